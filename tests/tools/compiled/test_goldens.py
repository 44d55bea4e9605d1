"""Steps of the GPU configurations, compiled whole, equal golden files; and the dry run
predicts their memory.

Each golden file is a record of tools/aot.py. Those whose names begin with `varied_`
were not used to fit the prediction (moejax/resolve/memory.py).
"""

import json
import pathlib

import pytest

from moejax.kernels.attention.cudnn import workspace_bytes
from moejax.perf.target import load
from moejax.resolve.kernels import attention_arrays
from tests.support.aot import run_aot
from train.config import gin_reader
from train.dry_run import dry_run

TOLERANCE = 0.02
"""Relative. Another version of XLA may lay buffers out in another order."""
PREDICTION = 0.1
"""Relative error of a predicted peak, at most."""
GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "aot"
GPUS = ("olmoe_1b_7b", "qwen3_30b_a3b", "mixtral_8x7b")
VARIED = ("batch", "dtype", "length", "mesh", "moments", "remat", "tensor")
NAMES = (*GPUS, *(f"varied_{name}" for name in VARIED))
EXACT = ("target", "mesh", "fits", "warnings", "num_xla_remat_ops", "attention_calls")
SHARES = ("exchange_hidden_share", "collective_hidden_share")


def read(name: str) -> dict:
    return json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_dry_run_predicts_the_peak(name, repo, monkeypatch):
    """A compiled step does not count the workspace of cuDNN's attention."""
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    golden = read(name)
    gin_files = [repo / gin_file for gin_file in golden["gin_files"]]
    cfg = gin_reader.load(gin_files, golden["gin_params"])
    record = dry_run(cfg, load("h100"))
    predicted = sum(record["memory"].values())
    if golden["attention_calls"]:
        predicted -= workspace_bytes(attention_arrays(cfg))
    assert predicted / 2**30 == pytest.approx(golden["peak_gib"], rel=PREDICTION)
    assert record["fit"]["fits"] == golden["fits"]


@pytest.mark.long
@pytest.mark.aot
@pytest.mark.parametrize("name", GPUS)
def test_a_configuration(repo, name):
    """This command writes a new golden file, to review before it replaces the old one:

    python tools/aot.py --gin_file=configs/olmoe_1b_7b.gin --json | tail -n 1 |
        python -m tests.support.golden_aot > tests/golden/aot/olmoe_1b_7b.json
    """
    golden = read(name)
    words = [f"--gin_param={param}" for param in golden["gin_params"]]
    words += [f"--gin_file={repo / path}" for path in golden["gin_files"]]
    _, record = run_aot(*words, f"--nodes={golden['nodes']}")
    assert record["peak_gib"] == pytest.approx(golden["peak_gib"], rel=TOLERANCE)
    for field in EXACT:
        assert record[field] == golden[field]
    for field in SHARES:
        assert record[field] == pytest.approx(golden[field], abs=TOLERANCE)
    slack = TOLERANCE * golden["peak_gib"]
    assert record["memory_gib"] == pytest.approx(golden["memory_gib"], abs=slack)
