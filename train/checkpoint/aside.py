"""Rename checkpoints that a run does not continue from; none is deleted.

<step>.corrupt[-n]    damaged
<step>.later[-n]      newer than the one that the user goes back to
"""

import os
import pathlib
from collections.abc import Callable

from train.checkpoint.record import DamagedCheckpointError, list_steps, read_record

SUMMARY = "summary.json"


def go_back(
    run_dir: pathlib.Path, step: int, check: Callable[[dict], object]
) -> list[str]:
    """Make `step` the newest checkpoint of a run directory; return a line for each
    rename.

    Later checkpoints are renamed to `<step>.later[-n]`, and the summary of a finished
    run to `summary.json.later[-n]`. Metrics are cut back when the run goes on. Raises
    ValueError, before anything is renamed, if there is no such checkpoint, if its
    record is damaged, or from `check(meta)`.
    """
    folder = run_dir / "checkpoints"
    steps = list_steps(folder) if folder.is_dir() else []
    if step not in steps:
        names = ", ".join(map(str, sorted(steps))) or "none"
        raise ValueError(
            f"--from_step={step}: {folder} has no checkpoint of this step; it has "
            f"{names}: name one of them"
        )
    try:
        record = read_record(folder, step)
    except DamagedCheckpointError as error:
        raise ValueError(
            f"--from_step={step}: checkpoint {folder / str(step)} is damaged: {error}: "
            "name another step"
        ) from error
    check(record["meta"])
    later = [folder / str(other) for other in reversed(steps) if other > step]
    if os.path.lexists(run_dir / SUMMARY):
        later.append(run_dir / SUMMARY)
    return [f"{path} renamed to {set_aside(path, 'later')}" for path in reversed(later)]


def set_aside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    """Rename `path` to `<path>.<suffix>`, or to the first of `<path>.<suffix>-2`, ..
    that is not taken, and return the new path."""
    new, count = path.with_name(f"{path.name}.{suffix}"), 1
    while os.path.lexists(new):
        count += 1
        new = path.with_name(f"{path.name}.{suffix}-{count}")
    return path.rename(new)
