"""Choice of the schedule of collectives by predicted time (Parm, arXiv 2407.00599).

The time of each schedule is a sum of named terms, at the speeds of a calibration. The
fastest schedule is taken.

    base    gather tokens over shards, all_to_all, experts, all_reduce, back (DeepSpeed)
    s1      split tokens over tensor, one all_to_all over owners x shards, gather tokens
    s2      route first, then split the rows; gather rows at the end
    s1h     as s1, with all_to_all over owners alone and rows gathered over shards
    local   experts whole, inside the tensor group: no all_to_all (PPMoE, 2304.11414)

    n  tokens of a tensor group      T  rows of its full send buffer, buffer_factor k n
    MP tensor                        ESP  expert_shards, EP owners: EP ESP = group x MP

The size of a collective is the papers': what an all_to_all sends, what an all_gather
returns, and what any other takes.
"""

import dataclasses
from collections.abc import Collection, Mapping
from functools import cached_property

from moejax.choice import Choice
from moejax.perf import exchange, terms
from moejax.perf.calibration import Calibration, leaving_bytes
from moejax.perf.terms import Prediction, Term, num_devices
from moejax.plan.schedule_rules import SCHEDULES, USUAL

SOURCES = {"s2": "sizes", "base": "owners"}
"""Groups of the devices that exchange counts of rows; otherwise all do."""
COUNT_BYTES = 4
"""Bytes of one expert's load, which is exchanged as an int32."""


@dataclasses.dataclass(frozen=True)
class MicroBatchShape:
    """Sizes of one MoE layer and one micro-batch, on which its time depends."""

    tokens: int
    """Number of tokens of one tensor group, each of whose devices holds all of them."""
    d_model: int
    """Width of a token."""
    d_expert: int
    """Hidden width of one expert, all of its shards together."""
    num_experts: int
    top_k: int
    buffer_factor: float
    """Copy of Dispatch.buffer_factor: buffers over the even share of rows."""
    itemsize: int
    """Bytes of one element in the compute dtype."""
    tensor: int
    """Number of devices along the tensor axis (MP)."""
    expert_shards: int
    """Number of parts into which the hidden width of each expert is cut (ESP)."""
    sizes: Mapping[str, int]
    """Number of devices along each mesh axis of the group, slow to fast:
    {"expert": 4}."""
    is_training: bool = True
    """Whether there is a backward pass."""
    remat: str = "none"
    """Copy of Model.remat."""
    overlap: float = 0.0
    """Share of the shorter of s2's last all_to_all and gather of rows that the longer
    one hides (Parm's SAA); 0 where collectives are serial."""

    @cached_property
    def groups(self) -> dict[str, exchange.Group]:
        """Groups of devices between which collectives run (moejax.perf.exchange)."""
        return exchange.groups(self.sizes, None, self.tensor, self.expert_shards)

    @property
    def num_dispatched(self) -> int:
        """Number of times that rows are sent to experts: forward, backward, and forward
        again with remat 'full'."""
        return 1 + self.is_training * (1 + (self.remat == "full"))

    @property
    def num_computed(self) -> int:
        """Time of the experts in all passes, as a multiple of their forward time."""
        return 1 + self.is_training * (2 + (self.remat != "none"))

    @property
    def num_fetched(self) -> int:
        """Number of times that weights which rest in parts are gathered."""
        return 1 + self.is_training * (self.remat != "none")


def choose(
    shape: MicroBatchShape,
    calibration: Calibration,
    schedules: Collection[str] | None = None,
) -> Choice[str]:
    """Return the fastest of the schedules; None: of all. Whether one can run with the
    rest of a configuration is not asked here (moejax.resolve.communication)."""
    names = [name for name in SCHEDULES if schedules is None or name in schedules]
    predictions = {name: predict(shape, calibration, name) for name in names}
    return terms.fastest(predictions, USUAL)


def predict(
    shape: MicroBatchShape, calibration: Calibration, schedule: str
) -> Prediction:
    """Return the time of one layer and micro-batch, in training with the backward pass.

    Loads are even, no row is dropped, and collectives are serial except for
    MicroBatchShape.overlap. Beside the terms of Parm (moejax.perf.exchange) there are
    those of the counts of rows, and of weights that rest in parts over data (local:
    over the group too).
    """
    maker, rules = _TermMaker(shape, calibration), SCHEDULES[schedule]
    sizes = shape.tensor, shape.expert_shards
    share = rules.num_gathered(*sizes) / rules.num_parts(*sizes)
    if rules.is_local:
        apart = {"data": calibration.mesh["data"], **shape.sizes}
        rows = shape.top_k * shape.tokens / shape.tensor
        return terms.make_prediction(
            *maker.rows(schedule, share),
            *maker.routed(shape.tokens, {}),
            maker.experts(rows, shape.d_expert),
            *maker.weights(apart, shape.num_experts / shape.tensor),
        )
    times = min(sizes) if schedule == "base" else 1
    sources = SOURCES.get(schedule, "everyone")
    found = shape.groups | {"sizes": shape.sizes}
    return terms.make_prediction(
        *maker.rows(schedule, share),
        *maker.routed(share * shape.tokens, found[sources]),
        *maker.computed(times),
    )


@dataclasses.dataclass(frozen=True)
class _TermMaker:
    """Maker of the terms of a predicted time, for one shape at the speeds of one
    calibration."""

    shape: MicroBatchShape
    calibration: Calibration

    def collective(self, name: str, group, size: float, count: int, cargo="") -> Term:
        """Return the term of `count` collectives of `size` bytes each."""
        leaving, lines = leaving_bytes(name, size, num_devices(group)), self.calibration
        return terms.collective_term(lines, name, group, leaving, count, cargo)

    def rows(self, schedule: str, share: float) -> tuple[Term, ...]:
        """Return the terms of rows and tokens, where the buffer of a device has this
        share of the full buffers for all tokens of its tensor group (T above)."""
        s = self.shape
        token_bytes = s.tokens * s.d_model * s.itemsize
        buffer = exchange.Buffer(share * s.buffer_factor * s.top_k * token_bytes)
        passes = exchange.Passes(
            count=s.num_dispatched,
            returns=1 + s.is_training,
            forward=s.num_dispatched - s.is_training,
            backward=int(s.is_training),
            token_bytes=token_bytes,
            tokens_count=1 + s.is_training,
            overlap=s.overlap,
        )
        return exchange.row_terms(schedule, buffer, passes, s.groups, self.calibration)

    def routed(self, tokens: float, sources: Mapping[str, int]) -> tuple[Term, Term]:
        """Return the terms of the router, and of the all_gather of its counts of rows
        for each expert."""
        s, count = self.shape, 1 + 2 * self.shape.is_training
        flops = count * 2 * tokens * s.d_model * s.num_experts
        size = num_devices(sources) * s.num_experts * COUNT_BYTES
        return (
            Term("router", count, 0.0, flops / self.calibration.flops_per_sec),
            self.collective("all_gather", sources, size, 1, "counts"),
        )

    def experts(self, rows: float, width: float) -> Term:
        """Return the term of a SwiGLU of this hidden width: three matrices, and 2 FLOPs
        for each weight and row."""
        count = self.shape.num_computed
        flops = count * 6 * rows * self.shape.d_model * width
        return Term("experts", count, 0.0, flops / self.calibration.flops_per_sec)

    def weights(self, group: Mapping[str, int], experts: float) -> tuple[Term, Term]:
        """Return the terms of gathering this number of whole experts, whose parts lie
        along the group, and of scattering their gradients."""
        s = self.shape
        size = experts * 3 * s.d_model * s.d_expert * s.itemsize
        back = int(s.is_training)
        return (
            self.collective("all_gather", group, size, s.num_fetched, "weights"),
            self.collective("reduce_scatter", group, size, back, "weights"),
        )

    def computed(self, times: float = 1.0) -> tuple[Term, ...]:
        """Return the terms of a device's expert shards and of their weights.

        Each row is computed `times` times by each shard. Weights rest in parts over
        data, unless data is part of the group.
        """
        s = self.shape
        rows = times * s.top_k * s.tokens * s.expert_shards / s.tensor
        data = 1 if "data" in s.sizes else self.calibration.mesh["data"]
        owned = s.num_experts / num_devices(s.groups["owners"]) / s.expert_shards
        weights = self.weights({"data": data}, owned)
        return self.experts(rows, s.d_expert / s.expert_shards), *weights
