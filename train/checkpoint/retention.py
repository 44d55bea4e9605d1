"""Which checkpoints are kept, and the removal of the others.

A step whose name in the directory is a link or a file is never removed: what a link
points to belongs to somebody else.
"""

import dataclasses
import pathlib
import shutil
from collections.abc import Iterable

from moejax.config import Checkpoint


@dataclasses.dataclass(frozen=True)
class Saved:
    """The parts of an undamaged checkpoint's record that decide how long it is kept."""

    step: int
    eval_loss: float | None
    num_skipped: int = 0
    """Updates in a row, up to its step, that were not finite and so were skipped."""
    bytes_per_sec: float | None = None
    """Rate of the save before it, or of a probe, or None."""

    @property
    def updated_step(self) -> int:
        """The last step that changed the parameters."""
        return self.step - self.num_skipped


def steps_to_remove(
    steps: Iterable[int], saved: Iterable[Saved], cfg: Checkpoint
) -> list[int]:
    """Return the steps of a directory to remove when the newest of `saved` is complete.

    Kept are the newest (Checkpoint.keep_last) and what is newer than the oldest of
    them, the best (keep_best), and, while updates are skipped, the one to go back to.
    A checkpoint with a damaged record is not in `saved`: it takes no place among those
    that are kept, and is removed when it is older than them.
    """
    saved = sorted(saved, key=lambda x: x.step)
    scored = [x for x in saved if x.eval_loss is not None]
    best = sorted(scored, key=lambda x: x.eval_loss)[: cfg.keep_best]
    kept = {x.step for x in best}
    if saved[-1].num_skipped:
        kept.add(step_before(saved, saved[-1].updated_step))
    oldest = saved[-cfg.keep_last :][0].step
    return [step for step in steps if step < oldest and step not in kept]


def step_before(saved: Iterable[Saved], updated_step: int) -> int | None:
    """Return the newest checkpoint to go back to when all updates after `updated_step`
    were skipped, or None without one.

    At its step no update was being skipped. A checkpoint with the parameters of
    `updated_step` itself is the second choice: their gradient is not finite, but may be
    in another configuration.
    """
    healthy = [x.step for x in saved if not x.num_skipped and x.step <= updated_step]
    before = [step for step in healthy if step < updated_step]
    return max(before or healthy, default=None)


def remove(directory: pathlib.Path, steps: Iterable[int]) -> list[str]:
    """Remove these checkpoints of a directory; return a line for each that stays."""
    lines = []
    for path in (directory / str(step) for step in sorted(steps)):
        if path.is_symlink() or not path.is_dir():
            kind = "a symbolic link" if path.is_symlink() else "no directory"
            lines.append(
                f"old checkpoint {path} is {kind} and stays: remove it by hand"
            )
            continue
        try:
            shutil.rmtree(path)
        except OSError as error:
            lines.append(f"old checkpoint {path} cannot be removed and stays: {error}")
    return lines
