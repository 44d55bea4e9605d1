"""Replay steps from a checkpoint, to find out which of two replicas is wrong.

A batch is a function of its step, so the steps since the newest checkpoint can be
computed again. The replica that a replay comes near to is right. It does not come to
equal bits: since the fault, the wrong replica has had a part in all gradients.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from train.balance.balancing import Balancing
from train.checkpoint.checkpoints import Checkpointer
from train.checkpoint.checksum import named_leaves
from train.data.feed import feed
from train.job import Job
from train.launch.processes import Watchdog, are_several
from train.messages import one_line
from train.replicas.shards import Difference
from train.step.state import TrainState

MAX_STEPS = 200
"""Number of steps that are replayed at most."""
CLEARLY = 2.0
"""Ratio of the replicas' distances from the replay above which it says which one is
wrong."""


class Verdict(NamedTuple):
    """Which devices hold a wrong replica of a leaf, and how that is known."""

    leaf: str
    wrong: tuple[int, ...]
    """Positions of the devices in the mesh; empty if that is not known."""
    reason: str


class Replay:
    """The means to compute the steps of a run again from its newest checkpoint."""

    def __init__(
        self,
        job: Job,
        balancing: Balancing,
        checkpointer: Checkpointer,
        watchdog: Watchdog,
        restore: Callable[[], tuple[TrainState | None, dict | None]],
        say: Callable[[str], None],
    ) -> None:
        """`restore` returns the state and the meta record of the newest good
        checkpoint, or None and None."""
        self._job, self._balancing, self._say = job, balancing, say
        self._checkpointer, self._watchdog = checkpointer, watchdog
        self._restore = restore

    def newest_step(self) -> int | None:
        """Return the step of the newest checkpoint, when it is written, or None."""
        written = self._checkpointer.num_written_bytes
        self._watchdog.at("the save before a difference of replicas", written)
        self._checkpointer.settle()
        return self._checkpointer.newest_step()

    def verdict(
        self, saved_step: int | None, now: int, state: TrainState, found: list
    ) -> Verdict:
        """Return which replica of the first leaf in `found` is wrong, by a replay from
        the checkpoint of `saved_step` to step `now`, that of `state`.

        The buffers of `state` are freed before the replay.
        """
        difference = found[0]
        leaf, devices = difference.leaf, difference.devices
        places = f"on devices {' and '.join(map(self._device_id, devices))}"

        def unknown(why: str) -> Verdict:
            return Verdict(
                leaf, (), f"{places}; which one is wrong is not known: {why}"
            )

        if saved_step is None:
            return unknown("there is no checkpoint to replay steps from")
        if now - saved_step > MAX_STEPS:
            return unknown(
                f"checkpoint {saved_step} is {now - saved_step} steps back, and "
                f"{MAX_STEPS} are replayed at most"
            )
        held_rx = self._on_all(state, difference)
        self._say(
            f"REPLICAS DIFFER: {leaf} {places}; steps {saved_step + 1} to {now} are "
            f"replayed from checkpoint {saved_step}, which shows the wrong one"
        )
        for array in jax.tree.leaves(state):
            array.delete()
        try:
            replayed = self._replayed(saved_step, now)
        except Exception as error:  # the difference is what the user must know
            return unknown(f"the replay failed: {one_line(repr(error), 200)}")
        if replayed is None:
            return unknown(f"checkpoint {saved_step} cannot be restored")
        right_rx = self._on_all(replayed, difference)
        distance_r = distances(held_rx, right_rx)
        near, far = min(distance_r), max(distance_r)
        how = f"a replay of steps {saved_step + 1} to {now}"
        figures = ", ".join(
            f"device {self._device_id(w)} is off by {d:.2g}"
            for w, d in zip(devices, distance_r)
        )
        if far <= CLEARLY * near:
            return unknown(f"{how} is as near to the one as to the other ({figures})")
        wrong = tuple(w for w, d in zip(devices, distance_r) if d > CLEARLY * near)
        return Verdict(leaf, wrong, f"{how} comes nearer to the other ({figures})")

    def _replayed(self, first: int, last: int) -> TrainState | None:
        """Return the state after step `last`, computed again from the checkpoint of
        step `first`, the newest, under the plan in use; None if it is damaged."""
        job, now = self._job, self._balancing
        self._watchdog.rest()  # as at the start: large checkpoints take long to read
        state, _ = self._restore()
        if state is None or int(state.step) != first:
            return None
        state = now.begin(state)
        for step in range(first + 1, last + 1):
            self._watchdog.at(f"the replay of step {step}")
            train = job.cfg.train
            sizes = train.batch_size, train.accumulate_steps
            windows = feed(job.batches, step - 1, *sizes, job.window_sharding)
            state, metrics = now.steps.run(step, state, now.placement, windows)
            jax.block_until_ready(metrics)
        return state

    def _on_all(self, state: TrainState, difference: Difference) -> list[np.ndarray]:
        """Return the replicas of a shard on the host of every process."""
        leaf = named_leaves(state)[difference.leaf]
        own = {shard.device: shard.data for shard in leaf.addressable_shards}
        shape = leaf.sharding.shard_shape(leaf.shape)
        replicas = []
        for position in difference.devices:
            device = self._job.model.mesh.devices.flat[position]
            replica = np.zeros(shape, leaf.dtype)
            if device in own:
                replica = np.asarray(own[device])
            if are_several():
                replica = _broadcast(replica, is_source=device in own)
            replicas.append(replica)
        return replicas

    def _device_id(self, position: int) -> str:
        return str(self._job.model.mesh.devices.flat[position].id)


def distances(held_rx: list[np.ndarray], right_rx: list[np.ndarray]) -> list[float]:
    """Return how far each replica is from its right value where the replicas differ.

    For floats that is the mean of absolute differences, and infinity if one is not
    finite; for other dtypes the share of elements that differ.
    """
    bits = [_bits(held) for held in held_rx]
    is_different_x = np.any([b != bits[0] for b in bits], axis=0)
    result = []
    for held, right in zip(held_rx, right_rx):
        held_x, right_x = (x.reshape(-1)[is_different_x] for x in (held, right))
        if jnp.issubdtype(held.dtype, jnp.floating):
            gap = np.abs(held_x.astype(np.float64) - right_x.astype(np.float64)).mean()
            result.append(float(gap) if np.isfinite(gap) else float("inf"))
        else:
            result.append(float((held_x != right_x).mean()))
    return result


def _bits(x: np.ndarray) -> np.ndarray:
    """Return the bits of an array's elements as whole numbers, flat."""
    return np.ascontiguousarray(x).reshape(-1).view(f"uint{8 * x.dtype.itemsize}")


def _broadcast(x: np.ndarray, *, is_source: bool) -> np.ndarray:
    """Return the array of the one process that is the source on all processes."""
    from jax.experimental import multihost_utils

    # Bytes, because a sum of floats with zeros would lose a sign of zero.
    flat = np.frombuffer(x.tobytes(), np.uint8)
    flat = multihost_utils.broadcast_one_to_all(flat, is_source=is_source)
    return np.frombuffer(flat.tobytes(), x.dtype).reshape(x.shape)
