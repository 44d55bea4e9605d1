"""Make a run directory of a published model, with a checkpoint of step 0.

The checkpoint has seen no data, so train/main.py continues it on any, given its
config.gin: --gin_file=RUN/config.gin --run_dir=RUN. Model.from_hf does the same at the
start of a run, and on several processes.
"""

import argparse
import dataclasses
import pathlib
import shlex
import time
from collections.abc import Callable

from moejax.config import Config
from moejax.interop.companions import TOKENIZER
from moejax.interop.write import require_new, whole_folder
from train.config import gin_reader
from train.config.from_hf import KEPT, folder_of
from train.files import write_whole
from train.launch.program import RunFailed, start
from train.logs.counter import BYTES, counted


def work(args: argparse.Namespace) -> dict:
    """Write the run directory; return the record."""
    require_new(args.out)
    source = f"Model.from_hf = {str(args.folder)!r}"
    cfg = gin_reader.load(args.gin_file, [source, *args.gin_param])
    start(cfg)
    from train.checkpoint.from_hf import check_folder, keep_companions

    check_folder(cfg)
    begun_sec = time.monotonic()
    with whole_folder(args.out) as partial:
        keep_companions(cfg, partial)
        own = own_config(cfg, args)
        write_whole(partial / "config.gin", gin_reader.render(own))
        num_bytes = save_first_state(cfg, own, partial)
    sec = time.monotonic() - begun_sec
    print(
        f"{args.out}: a run with a checkpoint of step 0, {num_bytes:,} bytes, "
        f"{sec:.1f} s"
    )
    gin_file, out = (shlex.quote(str(p)) for p in (args.out / "config.gin", args.out))
    print(
        f"continue it: python train/main.py --gin_file={gin_file} "
        f"--run_dir={out} --gin_param=\"Data.corpus = '...'\""
    )
    return {"out": str(args.out), "num_bytes": num_bytes, "sec": sec}


def own_config(cfg: Config, args: argparse.Namespace) -> Config:
    """Return the configuration of the run, which needs the folder no more: it has the
    folder's fields, and its own copy of the tokenizer."""
    data, model = cfg.data, dataclasses.replace(cfg.model, from_hf=None)
    if data.tokenizer == str(folder_of(cfg.model.from_hf) / TOKENIZER):
        data = dataclasses.replace(data, tokenizer=str(args.out / KEPT / TOKENIZER))
    return dataclasses.replace(cfg, model=model, data=data)


def save_first_state(cfg: Config, own: Config, run_dir: pathlib.Path) -> int:
    """Save the state at step 0 of a run that starts from the folder of `cfg`, as a
    checkpoint of the configuration `own`; return its bytes."""
    from train.checkpoint.checkpoints import Checkpointer, num_bytes
    from train.checkpoint.from_hf import first_state
    from train.checkpoint.identity import FORMAT
    from train.job import prepare_model

    model = prepare_model(cfg)
    run, store = model.run, model.layout.store

    def watch(what: str, total: int, poll: Callable[[], int]):
        return counted(what, BYTES, total, poll)

    state = first_state(run, model.optimizer, store, watch=watch)
    plan = {"plan": run.home_plan().to_json(), "num_owners": run.num_owners}
    meta = {"format": FORMAT, "config": own.to_dict(), "data": None, "balance": None}
    size = num_bytes(state)
    checkpointer = Checkpointer(run_dir / "checkpoints", cfg.checkpoint)
    try:
        with counted("writing", BYTES, size, checkpointer.num_written_bytes):
            checkpointer.save(0, state, meta | plan)
            is_saved = checkpointer.wait()
    finally:
        checkpointer.close()
    if not is_saved:
        raise RunFailed(f"the checkpoint was not saved: {checkpointer.last_failure}")
    return size
