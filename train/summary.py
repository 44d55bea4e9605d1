"""The end of a run: losses beside a baseline, throughput, loads, and a digest."""

import json
import math
import pathlib

import numpy as np

from train import identity
from train.checkpoint import Checkpointer
from train.checksum import checksums, digest
from train.loop import Outcome
from train.ngram import trigram_loss
from train.prepare import Job
from train.run_dir import write_whole

FILE = "summary.json"
SHADES = " .:-=+*#%@"
"""From no load to twice the mean and above."""


def finished_summary(path: pathlib.Path, job: Job) -> dict | None:
    """Summary of the run at `path` when it has done all steps of `job` or more.

    Raises ValueError when that was another model, or other data.
    """
    try:
        summary = json.loads((path / FILE).read_text())
    except FileNotFoundError:
        return None
    if summary["step"] < job.cfg.train.num_steps:
        return None
    checkpointer = Checkpointer(path / "checkpoints", job.cfg.checkpoint)
    meta = checkpointer.newest_meta()
    checkpointer.close()
    if meta is not None:
        identity.check(meta, job.cfg, job.meta["data"])
    return summary


def summarise(job: Job, outcome: Outcome, path: pathlib.Path) -> dict:
    """Prints the summary, writes it to summary.json and returns it."""
    held_out, loss = job.held_out, outcome.evaluation.loss
    batches = range(held_out.num_batches)
    windows_bt = np.concatenate(
        [held_out.rows(i, 0, held_out.batch_size) for i in batches]
    )
    step_sec = float(np.median(outcome.step_secs)) if outcome.step_secs else None
    summary = {
        "step": int(outcome.state.step),
        "eval_loss": loss if math.isfinite(loss) else None,
        "trigram_loss": trigram_loss(job.corpus.train_b, windows_bt),
        "steps_per_sec": 1 / step_sec if step_sec else None,
        "tok_per_sec": job.tokens_per_step / step_sec if step_sec else None,
        "compile_sec": outcome.compile_sec,
        "wall_sec": outcome.wall_sec,
        "load_le": outcome.evaluation.tokens_le.tolist(),
        "digest": digest(checksums(outcome.state.params)),
        "run_dir": str(path),
    }
    write_whole(path / FILE, json.dumps(summary))
    _print(summary, loss, outcome.evaluation.tokens_le)
    return summary


def _print(summary: dict, loss: float, tokens_le: np.ndarray) -> None:
    print(f"\nheld-out loss   {loss:.4f} nats per byte")
    print(f"trigram table   {summary['trigram_loss']:.4f} (same text, same bytes)")
    if summary["tok_per_sec"]:
        rate = f"{summary['tok_per_sec']:,.0f} tokens/s"
        print(
            f"throughput      {rate}, {summary['steps_per_sec']:.2f} steps/s (median)"
        )
    parts = f"compilation {summary['compile_sec']:.0f} s of it"
    print(f"wall time       {summary['wall_sec']:.0f} s, {parts}")
    print("load per expert on held-out text over the mean (' .:-=+*#%@': 0 to 2)")
    for layer, row_e in enumerate(tokens_le / tokens_le.mean(axis=1, keepdims=True)):
        shades = "".join(SHADES[min(int(x / 2 * len(SHADES)), 9)] for x in row_e)
        least, most = row_e.min(), row_e.max()
        print(f"  layer {layer:2d} |{shades}|  min {least:.2f}  max {most:.2f}")
    print(f"parameters      digest {summary['digest']} at step {summary['step']}")
    print(f"run directory   {summary['run_dir']}", flush=True)
