"""Print what W&B and MLflow have stored of a run, as JSON; run in a process of its own.

    python -P -m tests.support.read_trackers RUN_DIR MLFLOW_URI

The packages come from the folder of `make trackers`, or the environment.
"""

import json
import os
import pathlib
import struct
import sys
from collections.abc import Iterator

from train.logs.trackers import OWN_PACKAGES

sys.path.append(str(OWN_PACKAGES))

HEADER_BYTES, PIECE_BYTES, BLOCK_BYTES = 7, 7, 2**15


def read_wandb(run_dir: pathlib.Path) -> dict:
    """Return the ids of the offline runs, and for each tag its steps, over all."""
    from wandb.proto.wandb_internal_pb2 import Record

    ids, steps = [], {}
    for path in sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb")):
        for data in log_records(path.read_bytes()):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.append(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                items = {
                    "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                    for item in record.history.item
                }
                for tag in items:
                    steps.setdefault(tag, []).append(items["_step"])
    return {"ids": sorted(set(ids)), "steps": steps}


def log_records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a file of W&B: LevelDB's log format after a header. Blocks
    have 32 KiB; a piece has checksum (4 bytes), length (2) and kind (1): 1 whole, 2
    first, 3 middle, 4 last."""
    assert log.startswith(b":W&B")
    at, whole = HEADER_BYTES, b""
    while at + PIECE_BYTES <= len(log):
        if BLOCK_BYTES - at % BLOCK_BYTES < PIECE_BYTES:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        _, length, kind = struct.unpack_from("<IHB", log, at)
        at += PIECE_BYTES
        whole += log[at : at + length]
        at += length
        if kind in (1, 4):
            yield whole
            whole = b""


def read_mlflow(uri: str) -> dict:
    """Return the ids of the runs, their parameters, and for each metric its steps."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("moejax")
    runs = client.search_runs([experiment.experiment_id])
    steps = {
        tag: [m.step for m in client.get_metric_history(run.info.run_id, tag)]
        for run in runs
        for tag in run.data.metrics
    }
    return {
        "ids": [run.info.run_id for run in runs],
        "status": [run.info.status for run in runs],
        "params": [run.data.params for run in runs],
        "steps": steps,
    }


if __name__ == "__main__":
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    folder, store_uri = pathlib.Path(sys.argv[1]), sys.argv[2]
    found = {"wandb": read_wandb(folder), "mlflow": read_mlflow(store_uri)}
    print(json.dumps(found))
