"""Find silent corruption: replicas of a leaf must have equal bits throughout a run.

    step s is dispatched  ->  every N-th time: sum the shards, on the devices
    step s + 1            ->  read the sums of step s, and compare
    before each save      ->  sum, read and compare at once

A difference ends the run, and nothing is saved after it. With three or more replicas
the majority says which one is wrong. With two, a replay of the last steps does
(replay.py).
"""

from collections.abc import Callable

import jax

from train.balance.balancing import Balancing
from train.job import Job
from train.launch.processes import are_several, wait_for_all
from train.launch.program import RunFailed
from train.replicas.replay import Replay, Verdict
from train.replicas.shards import Difference, ReplicaCheck, coverage
from train.step.state import TrainState, abstract_state


class ReplicasDiffer(RunFailed):
    """Raised when replicas of a leaf do not have the same bits."""


class Replicas:
    """Comparison of the replicas of a run's state, every
    Train.check_replicas_every_steps steps and before each save."""

    def __init__(
        self,
        job: Job,
        balancing: Balancing,
        replay: Replay,
        say: Callable[[str], None],
    ) -> None:
        """Compile the comparison for each way in which the balancer may store
        experts."""
        self._job, self._balancing, self._replay = job, balancing, replay
        self._every_steps = job.cfg.train.check_replicas_every_steps
        self._waiting: tuple[int, ReplicaCheck, jax.Array] | None = None
        self._last_equal: int | None = None
        self._checks: dict[bool, ReplicaCheck] = {}
        if self._every_steps:
            self._compile(say)

    def _compile(self, say: Callable[[str], None]) -> None:
        model, used = self._job.model, self._balancing.layout.store
        for store in self._balancing.stores:
            if (store == "sharded") not in self._checks:
                state = abstract_state(model.run, model.optimizer, store)
                self._checks[store == "sharded"] = ReplicaCheck(state, model.mesh)
        say(
            f"replicas  {coverage(abstract_state(model.run, model.optimizer, used))}; "
            f"compared every {self._every_steps} steps and before each save (--dry_run "
            "lists them)"
        )

    def is_due(self, step: int) -> bool:
        """Return whether `put` begins or reads a comparison at this step."""
        is_first = bool(self._every_steps) and step % self._every_steps == 0
        return is_first or self._waiting is not None

    def put(self, step: int, state: TrainState) -> None:
        """Start to compare the replicas after `step` if that is due, and read the
        comparison that was started last. The state may be donated afterwards.

        Raises ReplicasDiffer.
        """
        self._read(step, state)
        if self._every_steps and step % self._every_steps == 0:
            self._start(step, state)

    def require_equal(self, step: int, state: TrainState) -> None:
        """Raise ReplicasDiffer unless the replicas after `step` are equal."""
        if self._every_steps and self._last_equal != step:
            if self._waiting is None:
                self._start(step, state)
            self._read(step, state)

    def _start(self, step: int, state: TrainState) -> None:
        check = self._checks[self._balancing.layout.store == "sharded"]
        table_wn = check.sums(state)
        if table_wn is not None:
            table_wn.copy_to_host_async()
            self._waiting = (step, check, table_wn)

    def _read(self, now: int, state: TrainState) -> None:
        """Read the comparison that waits, and raise ReplicasDiffer if replicas differ.

        `state` is that of step `now`, which is the comparison's step or the next one.
        """
        if self._waiting is None:
            return
        (step, check, table_wn), self._waiting = self._waiting, None
        found = check.differences(jax.device_get(table_wn))
        if found:
            if are_several():
                wait_for_all("replicas differ")
            raise ReplicasDiffer(self._explain(step, now, state, found))
        self._last_equal = step

    def _explain(
        self, step: int, now: int, state: TrainState, found: list[Difference]
    ) -> str:
        """Return one line: which replicas differ after `step`, since when, which of
        them is wrong, and what to do. The buffers of `state` may be freed."""
        saved_step = self._replay.newest_step()
        verdict = majority(found)
        if verdict is None:
            verdict = self._replay.verdict(saved_step, now, state, found)
        names = list(dict.fromkeys(x.leaf for x in found))
        names.insert(0, names.pop(names.index(verdict.leaf)))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        window = (
            "no comparison came before"
            if self._last_equal is None
            else f"they were equal after step {self._last_equal}"
        )
        go_on = (
            "there is no checkpoint, so that a new start begins at step 1"
            if saved_step is None
            else f"start again to go on from checkpoint {saved_step}, whose replicas "
            "were equal"
        )
        where = " and ".join(map(self._name, verdict.wrong))
        wrong = f" is wrong on {where}" if where else ""
        return (
            f"REPLICAS DIFFER after step {step}: {names[0]}{more}{wrong}: "
            f"{verdict.reason}; {window}; {go_on}, and replace a device that "
            "such lines name twice"
        )

    def _name(self, position: int) -> str:
        """Return a device's id, process and mesh coordinates, by its position."""
        mesh = self._job.model.mesh
        device, left = mesh.devices.flat[position], position
        where = []
        for axis, size in reversed(mesh.shape.items()):
            if size > 1:
                where.insert(0, f"{axis}={left % size}")
            left //= size
        place = f"process {device.process_index}, {', '.join(where)}"
        return f"device {device.id} ({place})"


def majority(found: list[Difference]) -> Verdict | None:
    """Return the devices that do not agree with most other replicas of the first leaf
    that has such a majority, or None."""
    for difference in found:
        if difference.wrong:
            num_right = len(difference.devices) - len(difference.wrong)
            reason = f"the {num_right} other replicas agree"
            return Verdict(difference.leaf, difference.wrong, reason)
    return None
