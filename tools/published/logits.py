"""Compute the logits of a published model, or of a run, in float32, for a comparison
with other implementations.

Each row of ids is one text from its first token on. On several simulated devices:
--gin_param 'Mesh.expert = 4' --gin_param 'Train.num_simulated_devices = 4'.
"""

import argparse
import pathlib
import time

import numpy as np

from train import cli
from train.launch.program import start

FLOAT32 = "Model.compute_dtype = 'float32'"


def work(args: argparse.Namespace) -> dict:
    """Compute the logits and write them; return the record."""
    ids_bt = read_ids(args.ids)
    if args.out.exists():
        raise ValueError(f"--out {args.out} exists: remove it or name another")
    args.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    found = cli.find(args.run_dir, args.step, [FLOAT32, *args.gin_param])
    check_ids(args.ids, ids_bt, found.cfg.model.vocab_size)
    start(found.cfg)
    from train.eval.logits import write_logits

    begun_sec = time.monotonic()
    loaded = cli.load(found)
    write_logits(args.out, loaded, ids_bt)
    shape, sec = (
        [*ids_bt.shape, loaded.cfg.model.vocab_size],
        time.monotonic() - begun_sec,
    )
    print(
        f"{args.out}: logits {shape}, float32, on {loaded.mesh.size} devices, "
        f"{sec:.1f} s"
    )
    return {"shape": shape, "step": loaded.step, "sec": sec, "out": str(args.out)}


def read_ids(path: pathlib.Path) -> np.ndarray:
    """Return the ids of a .npy file. Raises ValueError unless they are integers
    [b, t]."""
    try:
        ids_bt = np.load(path, allow_pickle=False)
    except OSError as error:
        raise ValueError(f"--ids {path}: {error.strerror or error}") from error
    except (ValueError, EOFError) as error:
        raise ValueError(f"--ids {path} is no .npy file of numbers") from error
    is_array = isinstance(ids_bt, np.ndarray)  # an .npz file is another thing
    if not is_array or ids_bt.ndim != 2 or not np.issubdtype(ids_bt.dtype, np.integer):
        what = f"{ids_bt.dtype}{list(ids_bt.shape)}" if is_array else "no array"
        raise ValueError(f"--ids {path} is {what}: give integers [b, t]")
    if not ids_bt.size:
        raise ValueError(f"--ids {path} has no id: give one or more")
    return ids_bt


def check_ids(path: pathlib.Path, ids_bt: np.ndarray, vocab_size: int) -> None:
    """Raise ValueError for an id that the model does not have."""
    low, high = int(ids_bt.min()), int(ids_bt.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"--ids {path} has the ids {low} to {high}, and the model has 0 to "
            f"{vocab_size - 1}"
        )
