"""The load of every layer as it is and as it will be: moving averages of what was seen.

    load_lwe       rows per step from source device w to expert e, of one group (with
                   several groups: their mean), all micro-batches together
    fullest_lt     most rows that one device had for one other in a micro-batch, in
                   each of the last steps

The forecast is Brown's: one moving average lags a ramp by as many steps as the average
of that average lags the first, so that both together know where the ramp is now and how
steep. At the start, when both have seen little, they agree, and nothing is forecast.
"""

import base64
import dataclasses
import json

import numpy as np

from moejax.plan.layout import Layout

WINDOW_STEPS = 100
"""Over how many observed steps the fullest pair is remembered."""

FEWEST_PAIRS = 20
"""Of fewer steps, the 95th percentile is no more than their maximum."""

ARRAYS = {"mean_lwe": "<f8", "mean_of_means_lwe": "<f8", "fullest_lt": "<i8"}


@dataclasses.dataclass(frozen=True)
class LoadTracker:
    """Moving averages by half life in steps; arrays are never written to."""

    half_life_steps: float
    step: int
    """The last one observed; -1 before any."""
    weight: float
    """Of all observations together, the last counting 1."""
    mean_lwe: np.ndarray
    mean_of_means_lwe: np.ndarray
    fullest_lt: np.ndarray
    """At most WINDOW_STEPS columns, the newest last."""

    @property
    def is_empty(self) -> bool:
        return self.step < 0

    @property
    def is_settled(self) -> bool:
        """Whether a half life of steps has been seen."""
        decay = 2.0 ** (-1.0 / self.half_life_steps)
        return self.weight * (1.0 - decay) > 0.5 - 1e-9

    @property
    def has_pairs(self) -> bool:
        """Whether fullest_pair_p95 is a percentile rather than a guess."""
        return self.fullest_lt.shape[1] >= FEWEST_PAIRS

    def to_json(self) -> str:
        """Bit for bit: arrays as base64 of their little-endian bytes."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, dtype in ARRAYS.items():
            raw = np.ascontiguousarray(record[name], dtype).tobytes()
            record[name] = {
                "shape": list(record[name].shape),
                "base64": base64.b64encode(raw).decode(),
            }
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> "LoadTracker":
        record = json.loads(text)
        for name, dtype in ARRAYS.items():
            raw = base64.b64decode(record[name]["base64"])
            native = np.dtype(dtype).newbyteorder("=")
            flat = np.frombuffer(raw, dtype).astype(native)
            record[name] = flat.reshape(record[name]["shape"])
        return cls(**record)


def init(
    num_layers: int, num_devices: int, num_experts: int, half_life_steps: float
) -> LoadTracker:
    """A tracker that has seen nothing."""
    zero_lwe = np.zeros((num_layers, num_devices, num_experts))
    no_pair_lt = np.zeros((num_layers, 0), np.int64)
    return LoadTracker(half_life_steps, -1, 0.0, zero_lwe, zero_lwe, no_pair_lt)


def observe(
    tracker: LoadTracker, step: int, tokens_lwe: np.ndarray, fullest_pair_l: np.ndarray
) -> LoadTracker:
    """The tracker after one more step; a step that was missed ages what was seen.

    `tokens_lwe` is int [layers, devices, experts], `fullest_pair_l` int [layers].
    ValueError for another shape, and for a step that is not after the last.
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
    return dataclasses.replace(
        tracker,
        step=int(step),
        weight=weight,
        mean_lwe=mean_lwe,
        mean_of_means_lwe=means_lwe + share * (mean_lwe - means_lwe),
        fullest_lt=np.concatenate([tracker.fullest_lt, pair_l1], 1)[:, -WINDOW_STEPS:],
    )


def forget_pairs(tracker: LoadTracker) -> LoadTracker:
    """The same loads; fullest pairs were another plan's and are no longer known."""
    return dataclasses.replace(tracker, fullest_lt=tracker.fullest_lt[:, :0])


def forecast(tracker: LoadTracker, ahead_steps: float = 0.0) -> np.ndarray:
    """Load so many steps after the last observed: moving average plus drift, float
    [l, w, e], never negative, of each layer as many rows as were seen.

    Exact for a ramp in the long run. No drift reaches further than a half life: on the
    recorded trace what lies beyond is worse than no drift. Source: R. G. Brown,
    Smoothing, Forecasting and Prediction (1963): level = 2 S1 - S2, slope = (S1 - S2) /
    lag of an average.
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


def drift(tracker: LoadTracker) -> np.ndarray:
    """Share of each layer's load that passes to other experts in one half life: total
    variation distance, float [l] in 0..1."""
    change_le = (tracker.mean_lwe - tracker.mean_of_means_lwe).sum(axis=1)
    moved_l = 0.5 * np.abs(change_le).sum(axis=1)
    seen_l = tracker.mean_lwe.sum(axis=(1, 2))
    in_half_life = tracker.half_life_steps / _lag_steps(tracker)
    return np.minimum(in_half_life * moved_l / np.maximum(seen_l, 1.0), 1.0)


def fullest_pair_p95(tracker: LoadTracker) -> np.ndarray:
    """Rows of a micro-batch that the fullest pair of devices exceeds in one step of
    twenty, float [l]; 0 where none was seen."""
    if not tracker.fullest_lt.shape[1]:
        return np.zeros(len(tracker.fullest_lt))
    return np.percentile(tracker.fullest_lt, 95, axis=1)


def _lag_steps(tracker: LoadTracker) -> float:
    """By how many steps a moving average of every step lags a ramp: d / (1 - d)."""
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
