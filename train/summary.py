"""The end of a run: losses beside a baseline, throughput, balance, loads, a digest."""

import json
import math
import pathlib

import numpy as np

from train.checkpoint import identity
from train.checkpoint.checksum import checksums, digest
from train.checkpoint.record import newest_meta
from train.data import byte_sample
from train.eval.held_out import format_expert_loads
from train.eval.ngram import trigram_loss
from train.files import path_named, write_whole
from train.job import Job
from train.launch.processes import from_first_process
from train.launch.program import say_loudly
from train.logs.balance_summary import balance_lines, count, summarise_balance
from train.logs.goodput import goodput_lines, report
from train.logs.record_lines import read_records
from train.loop import Outcome

FILE = "summary.json"
MAX_FILE_BYTES = 2**26
"""Size of a summary at most: the loads of 128 layers with 4096 experts take 5 MB."""
BASELINE_BYTES = 2**26
"""Number of training bytes that the trigram table counts, at most."""


def finished_summary(path: pathlib.Path, job: Job) -> dict | None:
    """Return the summary of the run at `path` if it has done all steps of `job`, else
    None.

    Raises ValueError if that run was of another model or of other data.
    """
    summary = _read_summary(path / FILE)
    if summary is None or summary["step"] < job.cfg.train.num_steps:
        return None
    meta = newest_meta(path / "checkpoints")
    if meta is not None:
        identity.check(meta, job.cfg, job.meta["data"])
    return summary


def _read_summary(file: pathlib.Path) -> dict | None:
    """Return the summary in a file, or None.

    A damaged file is renamed, and this is said: the run goes on from its checkpoint and
    writes the summary again.
    """
    try:
        with path_named(file), file.open("rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
        summary = json.loads(text) if len(text) <= MAX_FILE_BYTES else None
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        summary = None
    if _is_summary(summary):
        return summary
    aside = file.with_name(f"{FILE}.damaged")
    file.replace(aside)
    say_loudly(
        f"SUMMARY DAMAGED: {file} is not what a finished run writes, and is now "
        f"{aside.name}; the run goes on from its newest checkpoint"
    )
    return None


def _is_summary(summary) -> bool:
    """Return whether a value has the fields of a summary that a program reads."""
    if not isinstance(summary, dict):
        return False
    step, loss = summary.get("step"), summary.get("eval_loss", "")
    return (
        type(step) is int
        and 0 <= step < 2**63
        and (loss is None or (type(loss) in (int, float) and abs(loss) < 1e300))
        and all(isinstance(summary.get(name), str) for name in ("digest", "run_dir"))
    )


def summarise(job: Job, outcome: Outcome, path: pathlib.Path) -> dict:
    """Print the summary and return it; process 0 writes it to summary.json."""
    loss = outcome.evaluation.loss
    step_sec = float(np.median(outcome.step_secs)) if outcome.step_secs else None
    summary = {
        "step": int(outcome.state.step),
        "eval_loss": loss if math.isfinite(loss) else None,
        "trigram_loss": from_first_process(lambda: _trigram_loss(job)),
        "steps_per_sec": 1 / step_sec if step_sec else None,
        "tok_per_sec": job.tokens_per_step / step_sec if step_sec else None,
        "compile_sec": outcome.compile_sec,
        "wall_sec": outcome.wall_sec,
        "balance": from_first_process(
            lambda: summarise_balance(path / "metrics.jsonl", job.model.run.cfg)
        ),
        "load_le": outcome.evaluation.tokens_le.tolist(),
        "redone_steps": from_first_process(lambda: _redone_steps(path, job)),
        "digest": digest(checksums(outcome.state.params)),
        "run_dir": str(path),
    }
    summary["goodput"] = from_first_process(lambda: report(outcome.goodput.account()))
    from_first_process(lambda: write_whole(path / FILE, json.dumps(summary)))
    _print(summary, loss, outcome.evaluation.tokens_le, job)
    return summary


def _redone_steps(path: pathlib.Path, job: Job) -> int | None:
    """Return the number of steps of all attempts that ran again because an exchange
    overflowed; None where no step can."""
    if job.model.layout.overflow != "redo":
        return None
    records = read_records(path / "metrics.jsonl")
    return sum(record.get("redone") is True for record in records)


def _trigram_loss(job: Job) -> float | None:
    """Return the held-out loss of a table of trigram counts; None unless tokens are
    bytes."""
    train_b = byte_sample(job.corpus, BASELINE_BYTES)
    if train_b is None:
        return None
    held_out = job.held_out
    windows = [
        held_out.rows(i, 0, held_out.batch_size).token_bt
        for i in range(held_out.num_batches)
    ]
    return trigram_loss(train_b, np.concatenate(windows))


def _print(summary: dict, loss: float, tokens_le: np.ndarray, job: Job) -> None:
    """Print the summary as text for a reader."""
    print(f"\nheld-out loss   {loss:.4f} nats per {job.unit}")
    if summary["trigram_loss"] is not None:
        print(f"trigram table   {summary['trigram_loss']:.4f} (same text, same bytes)")
    if summary["tok_per_sec"]:
        rate = f"{summary['tok_per_sec']:,.0f} tokens/s"
        print(
            f"throughput      {rate}, {summary['steps_per_sec']:.2f} steps/s (median)"
        )
    if summary["redone_steps"] is not None:
        number = count(summary["redone_steps"], "step")
        print(f"overflows       {number} of {summary['step']} ran again")
    parts = f"compilation {summary['compile_sec']:.0f} s of it"
    print(f"wall time       {summary['wall_sec']:.0f} s, {parts}")
    print("\n".join(goodput_lines(summary["goodput"])))
    if summary["balance"] is not None:
        run = job.model.run
        print("\n".join(balance_lines(summary["balance"], run.cfg, run.speeds)))
    heading = "load per expert on held-out text over the mean"
    if job.cfg.router.kind == "recorded":
        heading = (
            "load per expert over the mean, as the recorded load is at its first step "
            "and not as in training"
        )
    print(f"{heading} (' .:-=+*#%@': 0 to 2)")
    print("\n".join(format_expert_loads(tokens_le)))
    print(f"parameters      digest {summary['digest']} at step {summary['step']}")
    print(f"run directory   {summary['run_dir']}", flush=True)
