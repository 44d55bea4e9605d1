"""Loads of a race: how many choices each expert gets, micro-batch by micro-batch.

    load       counts [micro-batches, layers, experts] of a whole run
    recorded   a recorded run, sample by sample
    jump       one expert has 0.4 of the choices; every 20 steps it is another one
    drift      the logarithm of each load wanders by itself
    burst      even loads, and for 10 of every 40 steps two hot experts on one device
    task       four tasks with loads of their own take turns, 50 steps each

Synthetic loads also vary by chance from one micro-batch to the next. Every layer has
experts and changes of its own. A seed decides all of it.
"""

import dataclasses
import pathlib
from collections.abc import Callable

import numpy as np

from moejax.moe.array_file import read_npz

STEPS_PER_SAMPLE = 2
"""Steps that follow one sample of a recording without micro-batches. The shared
recording has a sample every ten iterations: 200 steps then see the last 1000."""
HOT_SHARE, JUMP_STEPS = 0.4, 20
DRIFT_STD, DRIFT_RATE = 1.2, 0.02
"""Standard deviation of the logarithm of a load, and the share of its distance from the
mean that it loses in a step."""
BURST_SHARE, BURST_STEPS, BURST_EVERY_STEPS = 0.5, 10, 40
NUM_TASKS, TASK_STEPS, TASK_ZIPF = 4, 50, 1.2
NOISE = 0.1
"""Standard deviation of the logarithm of a micro-batch's load over its step's load."""
TOTAL = 1e6
"""Choices of one layer and micro-batch in a table; only ratios count."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the run that follows a load."""

    num_steps: int
    micro_batches: int
    """Number of micro-batches of a step."""
    num_layers: int
    num_experts: int
    num_devices: int
    """Number of devices; each owns consecutive experts."""

    @property
    def num_rows(self) -> int:
        """Number of micro-batches of the run."""
        return self.num_steps * self.micro_batches


def make_load(
    name: str, sizes: Sizes, seed: int, trace: pathlib.Path | None
) -> np.ndarray:
    """Return the counts [micro-batches, layers, experts] of a load.

    `trace` is the recording of 'recorded'; `seed` counts for the others. Raises
    ValueError for a load that does not exist, and for a recording that does not fit.
    """
    if name not in LOADS:
        raise ValueError(f"--load {name} is not a load: use {', '.join(LOADS)}")
    if name == "recorded":
        return recorded(trace, sizes)
    rng = np.random.default_rng(seed)
    share_tle = np.stack(
        [SYNTHETIC[name](rng, sizes) for _ in range(sizes.num_layers)], axis=1
    )
    count_rle = np.repeat(share_tle, sizes.micro_batches, axis=0)
    count_rle = count_rle * np.exp(NOISE * rng.standard_normal(count_rle.shape))
    return TOTAL * count_rle / count_rle.sum(axis=-1, keepdims=True)


def thin(
    count_rle: np.ndarray, sizes: Sizes, first_steps: int, num_steps: int, kept: int
) -> np.ndarray:
    """Return the counts of a run beside the one that follows `count_rle`, which does
    `kept` steps for every `num_steps` of that one, spread evenly over them.

    The counts repeat, for it is beside one run after another: the first of them stand
    at step `first_steps`, after which blocks begin.
    """
    by_step = count_rle.reshape(sizes.num_steps, -1, *count_rle.shape[1:])
    step_bt = np.arange(first_steps, sizes.num_steps).reshape(-1, num_steps)
    places = ((np.arange(kept) + 0.5) * num_steps / kept).astype(int)
    chosen = np.roll(by_step[step_bt[:, places].ravel()], first_steps, axis=0)
    return chosen.reshape(-1, *count_rle.shape[1:])


def jump(rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
    """Return shares [t, e] of one layer, in which a hot expert moves to another device
    every JUMP_STEPS steps."""
    own = sizes.num_experts // sizes.num_devices
    share_te = _even(sizes, 1 - HOT_SHARE)
    hot = int(rng.integers(sizes.num_experts))
    for step in range(sizes.num_steps):
        if step and step % JUMP_STEPS == 0:
            others = np.arange(sizes.num_experts)
            hot = int(rng.choice(others[others // own != hot // own]))
        share_te[step, hot] += HOT_SHARE
    return share_te


def drift(rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
    """Return shares [t, e] of one layer, whose logarithms are Ornstein-Uhlenbeck
    processes that begin in their stationary distribution."""
    log_e = DRIFT_STD * rng.standard_normal(sizes.num_experts)
    log_te = np.empty((sizes.num_steps, sizes.num_experts))
    kept = 1 - DRIFT_RATE
    for step in range(sizes.num_steps):
        log_te[step] = log_e
        noise_e = rng.standard_normal(sizes.num_experts)
        log_e = kept * log_e + DRIFT_STD * np.sqrt(1 - kept**2) * noise_e
    share_te = np.exp(log_te)
    return share_te / share_te.sum(axis=1, keepdims=True)


def burst(rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
    """Return shares [t, e] of one layer, which are even but for bursts, in which two
    experts of one device share BURST_SHARE."""
    own = sizes.num_experts // sizes.num_devices
    share_te = _even(sizes, 1.0)
    for begin in range(BURST_STEPS, sizes.num_steps, BURST_EVERY_STEPS):
        steps = slice(begin, begin + BURST_STEPS)
        first = own * int(rng.integers(sizes.num_devices))
        hot = first + rng.permutation(own)[:2]
        share_te[steps] *= 1 - BURST_SHARE
        share_te[steps, hot] += BURST_SHARE / len(hot)
    return share_te


def task(rng: np.random.Generator, sizes: Sizes) -> np.ndarray:
    """Return shares [t, e] of one layer, which follow tasks in turn. A task has Zipf
    loads with the experts in an order of its own."""
    share_e = np.arange(1.0, sizes.num_experts + 1) ** -TASK_ZIPF
    share_qe = np.stack([rng.permutation(share_e) for _ in range(NUM_TASKS)])
    task_t = np.arange(sizes.num_steps) // TASK_STEPS % NUM_TASKS
    return share_qe[task_t] / share_e.sum()


SYNTHETIC: dict[str, Callable[[np.random.Generator, Sizes], np.ndarray]] = {
    "jump": jump,
    "drift": drift,
    "burst": burst,
    "task": task,
}
LOADS = ("recorded", *SYNTHETIC)
"""Names of the loads of a race."""


def recorded(trace: pathlib.Path, sizes: Sizes) -> np.ndarray:
    """Return the counts [micro-batches, layers, experts] of the last samples of a
    recording.

    The array `tokens` is [samples, layers, devices, experts], where each sample serves
    all micro-batches of STEPS_PER_SAMPLE steps, or [samples, layers, micro-batches,
    devices, experts], where each of its micro-batches serves one. Of its layers those
    with the largest median of device max/mean under home are taken, in their order.
    """
    if not trace.is_file():
        raise ValueError(f"--trace {trace} is not a file: name a recorded routing")
    tokens = read_npz(trace, ["tokens"]).get("tokens")
    shape = [] if tokens is None else list(tokens.shape)
    if len(shape) not in (4, 5) or shape[-1] != sizes.num_experts:
        raise ValueError(
            f"{trace} has tokens of shape {shape}: a race needs [samples, layers, "
            f"(micro-batches,) devices, {sizes.num_experts}]"
        )
    if shape[1] < sizes.num_layers:
        raise ValueError(
            f"{trace} has {shape[1]} layers, and the model has {sizes.num_layers}: "
            "record more, or lower Model.num_layers"
        )
    count_slme = tokens.sum(axis=-2, dtype=np.float64)
    if len(shape) == 4:
        count_slme = count_slme[:, :, None].repeat(
            STEPS_PER_SAMPLE * sizes.micro_batches, axis=2
        )
    per_sample = count_slme.shape[2]
    num_samples = -(-sizes.num_rows // per_sample)
    if num_samples > len(count_slme):
        most = len(count_slme) * per_sample // sizes.micro_batches
        raise ValueError(
            f"{trace} has samples for {most} steps of {sizes.micro_batches} "
            f"micro-batches, and a race needs {sizes.num_steps}, with those before the "
            f"first block: lower --steps by at least {sizes.num_steps - most}"
        )
    count_slme = count_slme[-num_samples:]
    layers = _most_skewed(count_slme.sum(axis=2), sizes)
    count_rle = np.moveaxis(count_slme[:, layers], 2, 1).reshape(
        -1, sizes.num_layers, sizes.num_experts
    )
    return count_rle[: sizes.num_rows]


def _most_skewed(count_sle: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Return the positions of the least even layers, as many as the model has."""
    by_device = (*count_sle.shape[:2], sizes.num_devices, -1)
    rows_slw = count_sle.reshape(by_device).sum(axis=-1)
    mean_sl = np.maximum(rows_slw.mean(axis=-1), 1e-9)
    ratio_l = np.median(rows_slw.max(axis=-1) / mean_sl, axis=0)
    return np.sort(np.argsort(-ratio_l, kind="stable")[: sizes.num_layers])


def _even(sizes: Sizes, total: float) -> np.ndarray:
    """Return shares [t, e] of one layer that are even, and sum to `total`."""
    shape = (sizes.num_steps, sizes.num_experts)
    return np.full(shape, total / sizes.num_experts)
