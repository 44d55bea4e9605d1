"""Moving averages of the load of each layer, and a forecast from them.

    load_lwe       rows per step from source device w to expert e, of one group or the
                   mean over several groups, all micro-batches together
    fullest_lt     most rows that one device had for one other in a micro-batch, in
                   each of the last steps
    together_lee   tokens per step that choose both of two experts, of all groups; None
                   where no policy needs them

The forecast is Brown's. On a ramp, a moving average lags the load by as many steps as
the average of that average lags the first one. Both together therefore give the ramp's
current value and its slope. At the start, when both have seen little, they agree, and
the forecast has no drift.

Loads that jump are not forecast. The *surprise* of a step is the share of its rows that
lie elsewhere than in the moving average before it (total variation, by expert, mean of
layers). Its mean over steps, over the distance between what came before a jump and what
came after, is the share of steps in which a plan is for another load than it meets
(`stale`).
"""

import dataclasses

import numpy as np

from moejax.plan.layout import Layout
from moejax.plan.units import device_order, unit_order

WINDOW_STEPS = 100
"""Number of observed steps over which the fullest pair is remembered."""

SURPRISE_STEPS = 100
"""Half-life of the mean surprise, and of what is known of the last jump, in steps."""
MIN_PAIR_STEPS = 20
"""Number of observed steps from which the 95th percentile of the fullest pair is known.
With fewer it would be their maximum."""


@dataclasses.dataclass(frozen=True)
class LoadTracker:
    """Moving averages of loads, and recent fullest pairs of devices.

    The arrays are never written to.
    """

    half_life_steps: float
    """Half-life of the moving averages, in steps."""
    step: int
    """Last observed step; -1 before the first."""
    weight: float
    """Sum of the weights of all observations, where the last one has weight 1."""
    mean_lwe: np.ndarray
    """Moving average of the loads."""
    mean_of_means_lwe: np.ndarray
    """Moving average of `mean_lwe`."""
    fullest_lt: np.ndarray
    """Rows of the fullest pair in the last steps, at most WINDOW_STEPS columns, the
    newest last."""
    together_lee: np.ndarray | None = None
    """Moving average of the tokens that choose both of two experts, in float32; None
    where they are not counted."""
    surprise_sum: float = 0.0
    """Sum of the surprises of steps, of which older ones count less."""
    surprise_weight: float = 0.0
    """Sum of the weights of these steps."""
    largest_surprise: float = 0.0
    """Largest surprise of a step, of which older ones count less."""
    left_lwe: np.ndarray | None = None
    """Moving average of the loads before that step; None before the first surprise."""

    @property
    def is_empty(self) -> bool:
        """Whether no step has been observed."""
        return self.step < 0

    @property
    def is_settled(self) -> bool:
        """Whether at least a half-life of steps has been observed."""
        decay = 2.0 ** (-1.0 / self.half_life_steps)
        return self.weight * (1.0 - decay) > 0.5 - 1e-9

    @property
    def has_pairs(self) -> bool:
        """Whether enough steps were observed for fullest_pair."""
        return self.fullest_lt.shape[1] >= MIN_PAIR_STEPS


def init(
    num_layers: int, num_devices: int, num_experts: int, half_life_steps: float
) -> LoadTracker:
    """Return a tracker that has observed nothing."""
    zero_lwe = np.zeros((num_layers, num_devices, num_experts))
    no_pair_lt = np.zeros((num_layers, 0), np.int64)
    return LoadTracker(half_life_steps, -1, 0.0, zero_lwe, zero_lwe, no_pair_lt)


def observe(
    tracker: LoadTracker,
    step: int,
    tokens_lwe: np.ndarray,
    fullest_pair_l: np.ndarray,
    together_lee: np.ndarray | None = None,
) -> LoadTracker:
    """Return the tracker after one more observed step.

    `tokens_lwe` is int [layers, devices, experts], `fullest_pair_l` int [layers], and
    `together_lee` int [layers, experts, experts] where it is counted. Steps
    between that were not observed age the earlier observations too. Raises ValueError
    for another shape, and for a step that is not after the last one.
    """
    shape = tracker.mean_lwe.shape
    if np.shape(tokens_lwe) != shape or np.shape(fullest_pair_l) != shape[:1]:
        raise ValueError(
            f"loads must be [layers, devices, experts] = {list(shape)} and fullest "
            f"pairs [{shape[0]}], and are {list(np.shape(tokens_lwe))} and "
            f"{list(np.shape(fullest_pair_l))}: use a tracker of this run's shape"
        )
    if step <= tracker.step:
        raise ValueError(
            f"step {step} was observed after step {tracker.step}: steps must rise"
        )
    gap_steps = step - max(tracker.step, 0)
    weight = 1.0 + tracker.weight * 2.0 ** (-gap_steps / tracker.half_life_steps)
    share = 1.0 / weight
    mean_lwe = tracker.mean_lwe + share * (tokens_lwe - tracker.mean_lwe)
    means_lwe = tracker.mean_of_means_lwe
    pair_l1 = np.asarray(fullest_pair_l, np.int64)[:, None]
    mean_lee = tracker.together_lee
    if together_lee is not None:
        mean_lee = together_lee if mean_lee is None else mean_lee
        mean_lee = (mean_lee + share * (together_lee - mean_lee)).astype(np.float32)
    if tracker.is_settled:
        tracker = _surprised(tracker, tokens_lwe, gap_steps)
    return dataclasses.replace(
        tracker,
        step=int(step),
        weight=weight,
        mean_lwe=mean_lwe,
        mean_of_means_lwe=means_lwe + share * (mean_lwe - means_lwe),
        fullest_lt=np.concatenate([tracker.fullest_lt, pair_l1], 1)[:, -WINDOW_STEPS:],
        together_lee=mean_lee,
    )


def _surprised(
    tracker: LoadTracker, tokens_lwe: np.ndarray, gap_steps: int
) -> LoadTracker:
    """Return the tracker with the surprise of one more step."""
    fade = 2.0 ** (-gap_steps / SURPRISE_STEPS)
    surprise = _distance(tokens_lwe, tracker.mean_lwe)
    largest, left_lwe = fade * tracker.largest_surprise, tracker.left_lwe
    if surprise > largest:
        largest, left_lwe = surprise, tracker.mean_lwe
    return dataclasses.replace(
        tracker,
        surprise_sum=surprise + fade * tracker.surprise_sum,
        surprise_weight=1.0 + fade * tracker.surprise_weight,
        largest_surprise=largest,
        left_lwe=left_lwe,
    )


def stale(
    tracker: LoadTracker, load_lwe: np.ndarray
) -> tuple[float, np.ndarray | None]:
    """Return the share of steps in which a plan for `load_lwe` is expected to meet
    another load, and that load [l, w, e]: what came before the last jump. Without any
    surprise they are 0 and None.

    What the largest jump alone has added does not count: it may not come again.
    """
    if tracker.left_lwe is None:
        return 0.0, None
    apart = _distance(tracker.left_lwe, load_lwe)
    once = tracker.largest_surprise * (1.0 + _lag_steps(tracker))
    mean = max(0.0, tracker.surprise_sum - once) / tracker.surprise_weight
    return (min(1.0, mean / apart) if apart > 0 else 0.0), tracker.left_lwe


def _distance(load_lwe: np.ndarray, other_lwe: np.ndarray) -> float:
    """Return the total variation distance of two loads by expert, mean of layers: 0 if
    they are equal, 1 if no expert has rows in both."""
    rows_le, other_le = load_lwe.sum(axis=1), other_lwe.sum(axis=1)
    rows_le, other_le = (
        x / np.maximum(x.sum(axis=1, keepdims=True), 1e-300)
        for x in (rows_le, other_le)
    )
    return float(np.abs(rows_le - other_le).sum(axis=1).mean() / 2)


def forget_pairs(tracker: LoadTracker) -> LoadTracker:
    """Return the tracker without fullest pairs, which depend on the plan."""
    return dataclasses.replace(tracker, fullest_lt=tracker.fullest_lt[:, :0])


def forecast(tracker: LoadTracker, ahead_steps: float = 0.0) -> np.ndarray:
    """Return the load `ahead_steps` after the last observed step, float [l, w, e].

    It is the moving average plus a drift, is never negative, and has as many rows in
    each layer as the moving average. In the long run it is exact for a ramp. The drift
    ends after one half-life: on the recorded trace a drift beyond that was worse than
    none. Source: R. G. Brown, Smoothing, Forecasting and Prediction (1963): level = 2
    S1 - S2, slope = (S1 - S2) / lag of an average.
    """
    reach_steps = min(ahead_steps, tracker.half_life_steps)
    ahead = 1.0 + reach_steps / _lag_steps(tracker)
    change_lwe = tracker.mean_lwe - tracker.mean_of_means_lwe
    load_lwe = np.maximum(tracker.mean_lwe + ahead * change_lwe, 0.0)
    seen_l = tracker.mean_lwe.sum(axis=(1, 2))
    forecast_l = load_lwe.sum(axis=(1, 2))
    factor_l = np.divide(seen_l, forecast_l, out=np.ones_like(seen_l),
                         where=forecast_l > 0)  # fmt: skip
    return load_lwe * factor_l[:, None, None]


def fullest_pair(tracker: LoadTracker, percentile: float) -> np.ndarray:
    """Return a percentile over recent steps of the fullest pair of devices, in rows of
    a micro-batch, float [l]; 0 where no pair was observed."""
    if not tracker.fullest_lt.shape[1]:
        return np.zeros(len(tracker.fullest_lt))
    return np.percentile(tracker.fullest_lt, percentile, axis=1)


def _lag_steps(tracker: LoadTracker) -> float:
    """Return the number of steps by which a moving average of each step lags a ramp,
    d / (1 - d), where d is the decay per step."""
    decay = 2.0 ** (-1.0 / tracker.half_life_steps)
    return decay / (1.0 - decay)


def loads_by_owner(
    tokens_lwe: np.ndarray, sizes: dict[str, int], layout: Layout
) -> np.ndarray:
    """Return the load of each expert by owner of the tokens, averaged over the groups.

    `tokens_lwe` counts choices by device that splits the batch (RoutingStats). `sizes`
    are the numbers of devices along dc, data and expert, in the order of the mesh. If a
    group has more owners than batch shards, because the tensor axis is among its axes,
    the load of a shard is divided equally among its owners. If several devices belong
    to one owner, their loads are added.
    """
    num_layers, _, num_experts = tokens_lwe.shape
    load = tokens_lwe.reshape(num_layers, *sizes.values(), num_experts)
    outside = tuple(1 + i for i, axis in enumerate(sizes) if axis not in layout.axes)
    load_lwe = load.mean(axis=outside).reshape(num_layers, -1, num_experts)
    w, sources = layout.num_devices, load_lwe.shape[1]
    if sources < w:
        return np.repeat(load_lwe, w // sources, axis=1) / (w // sources)
    return load_lwe.reshape(num_layers, w, -1, num_experts).sum(axis=2)


def home_rows(
    tokens_lwe: np.ndarray, sizes: dict[str, int], layout: Layout
) -> np.ndarray:
    """Return the rows that each owner of experts would compute under the home plan, in
    the layout's domains.

    Arguments are those of `loads_by_owner`; the result [l, w] has the owners of all
    groups. A device of a domain computes the rows for its domain's experts that come
    from devices at the same place of their domains.
    """
    num_layers, _, num_experts = tokens_lwe.shape
    load = tokens_lwe.reshape(num_layers, *sizes.values(), num_experts)
    inside = tuple(1 + i for i, axis in enumerate(sizes) if axis in layout.axes)
    outside = [i for i in range(1, load.ndim - 1) if i not in inside]
    load = load.transpose(0, *outside, *inside, load.ndim - 1)
    load = load.reshape(num_layers, -1, layout.num_devices, num_experts)
    load = load[:, :, device_order(layout)][..., unit_order(layout)]
    size, units = layout.domain_size, layout.exchanged.num_devices
    load = load.reshape(num_layers, -1, units, size, num_experts).sum(axis=2)
    rows = load.reshape(num_layers, -1, size, units, num_experts // units).sum(axis=-1)
    return rows.reshape(num_layers, -1)
