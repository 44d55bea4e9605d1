"""Which schedule of collectives a layer's rows travel by: predicted from a calibration,
one named sum of terms for each, and the fastest taken (Parm, arXiv 2407.00599).

    base    gather tokens over shards, all_to_all, experts, all_reduce, back (DeepSpeed)
    s1      split tokens over tensor, one all_to_all over owners x shards, gather tokens
    s2      route first, then split the rows; gather rows at the end
    s1h     as s1, with all_to_all over owners alone and rows gathered over shards
    local   experts whole, inside the tensor group: no all_to_all (PPMoE, 2304.11414)

    n  tokens of a tensor group      T  rows of its full send buffer, buffer_factor k n
    MP tensor                        ESP  expert_shards, EP owners: EP ESP = group x MP

Sizes follow the papers: what an all_to_all sends, an all_gather returns, others take.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

from moejax.perf import terms
from moejax.perf.calibration import Calibration, leaving_bytes
from moejax.perf.terms import Prediction, Term, num_devices
from moejax.plan.schedule_rules import SCHEDULES, UNSPLIT

USUAL = "base"
"""The schedule that others are compared with: DeepSpeed-MoE's."""
COUNT_BYTES = 4
"""Loads are exchanged as int32, one for each expert."""


@dataclasses.dataclass(frozen=True)
class MicroBatchShape:
    """Of one MoE layer in one micro-batch."""

    tokens: int
    """Of one tensor group: each of its devices holds all of them."""
    d_model: int
    d_expert: int
    num_experts: int
    top_k: int
    buffer_factor: float
    itemsize: int
    tensor: int
    expert_shards: int
    """Parts that one expert's hidden width is cut into."""
    sizes: Mapping[str, int]
    """Devices along each mesh axis of the group, slow to fast: {"expert": 4}."""
    is_training: bool = True
    remat: str = "none"
    overlap: float = 0.0
    """Part of the shorter of s2's last all_to_all and gather of rows that the longer
    one hides (SAA); 0 where collectives are serial."""

    @cached_property
    def groups(self) -> dict[str, dict[str, int]]:
        """Mesh axes, {name: devices}, of owners of experts, of the shards of one, of
        both (everyone), of the part of tensor that owners lie along (outer), and of
        that of expert that shards lie along (within)."""
        expert, tensor, shards = self.sizes["expert"], self.tensor, self.expert_shards
        outer, inner = terms.parted("tensor", tensor, min(tensor, shards))
        owners, within = terms.parted("expert", expert, max(1, shards // tensor))
        others = {axis: size for axis, size in self.sizes.items() if axis != "expert"}
        return {
            "owners": {**others, **owners, **outer},
            "shards": {**within, **inner},
            "everyone": {**self.sizes, "tensor": tensor},
            "tensor": {"tensor": tensor},
            "outer": outer,
            "within": within,
        }

    @property
    def num_exchanged(self) -> int:
        """Passes that exchange rows: forward, back, and forward again."""
        return 1 + self.is_training * (1 + (self.remat == "full"))

    @property
    def num_computed(self) -> int:
        """Forward times of the experts."""
        return 1 + self.is_training * (2 + (self.remat != "none"))

    @property
    def num_fetched(self) -> int:
        """How often weights that lie in parts are gathered."""
        return 1 + self.is_training * (self.remat != "none")


@dataclasses.dataclass(frozen=True)
class ScheduleChoice:
    schedule: str
    predictions: dict[str, Prediction]
    why: str

    def table(self) -> str:
        """Every candidate's predicted time by term, fastest first."""
        return terms.tables(self.predictions)


def choose(
    shape: MicroBatchShape,
    calibration: Calibration,
    among: Collection[str] | None = None,
) -> ScheduleChoice:
    """Return the fastest of the candidates that are `among` (None: of all candidates).

    ValueError as `candidates`.
    """
    among = TIMES if among is None else among
    names = [name for name in candidates(shape) if name in among]
    predictions = {name: predict(shape, calibration, name) for name in names}
    chosen = terms.first_fastest(predictions)
    usual = USUAL if USUAL in names else chosen
    return ScheduleChoice(chosen, predictions, terms.why(chosen, predictions, usual))


def candidates(shape: MicroBatchShape) -> tuple[str, ...]:
    """Those that can run; ValueError, one line with the rules, when none can."""
    refusals = {name: refusal(shape, name) for name in TIMES}
    if all(refusals.values()):
        rules = "; ".join(dict.fromkeys(refusals.values()))
        raise ValueError(f"no schedule can run: {rules}")
    return tuple(name for name in TIMES if not refusals[name])


def refusal(shape: MicroBatchShape, schedule: str) -> str:
    """The rule that keeps a schedule from running, in a line; '' when none does."""
    rules = _rules_of_local if SCHEDULES[schedule].is_local else _rules
    return next((rule for holds, rule in rules(shape, schedule) if not holds), "")


def _rules(shape: MicroBatchShape, schedule: str) -> Iterator[tuple[bool, str]]:
    tensor, shards, expert = shape.tensor, shape.expert_shards, shape.sizes["expert"]
    said = f"expert_shards={shards} must"
    yield (
        tensor % shards == 0 or expert * tensor % shards == shards % tensor == 0,
        f"{said} divide tensor={tensor}, or be {tensor} times a divisor of the expert "
        f"axis ({expert}): use {tensor}",
    )
    fits, width = shape.d_expert % shards == 0, f"d_expert={shape.d_expert}"
    yield fits, f"{said} divide {width}: use {tensor}, or another d_expert"
    owners = num_devices(shape.groups["owners"])
    yield (
        shape.num_experts % owners == 0,
        f"num_experts={shape.num_experts} must be divisible by their {owners} owners: "
        f"use {-(-shape.num_experts // owners) * owners}",
    )
    parts = SCHEDULES[schedule].num_parts(tensor, shards)
    yield (
        shape.tokens % parts == 0,
        f"{schedule} splits the tokens of a tensor group ({shape.tokens}) in {parts} "
        f"parts: use another batch, or '{UNSPLIT}'",
    )


def _rules_of_local(
    shape: MicroBatchShape, schedule: str
) -> Iterator[tuple[bool, str]]:
    group, tensor = "_".join(shape.sizes), shape.tensor
    yield (
        tensor > 1,
        f"{schedule} needs a tensor axis of several devices: use Mesh.tensor=2",
    )
    yield (
        group == "expert",
        f"{schedule} needs Dispatch.group='expert', and it is '{group}'",
    )
    yield (
        shape.num_experts % tensor == 0,
        f"{schedule} needs num_experts={shape.num_experts} to be divisible by "
        f"tensor={tensor}: use {-(-shape.num_experts // tensor) * tensor}",
    )


def predict(
    shape: MicroBatchShape, calibration: Calibration, schedule: str
) -> Prediction:
    """Seconds of one layer and micro-batch, backward included when training.

    Loads are even, no row is dropped, collectives are serial but for Shape.overlap.
    Beside Parm's there are counts, and weights in parts over data (local: group too).
    """
    return terms.make_prediction(*TIMES[schedule](_Parts(shape, calibration)))


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Makes the terms of one shape under one calibration."""

    shape: MicroBatchShape
    calibration: Calibration

    def collective(self, name: str, group, size: float, count: int, cargo="") -> Term:
        """`size` in bytes."""
        leaving, lines = leaving_bytes(name, size, num_devices(group)), self.calibration
        return terms.collective_term(lines, name, group, leaving, count, cargo)

    @property
    def token_bytes(self) -> float:
        """Of all tokens of a tensor group."""
        return self.shape.tokens * self.shape.d_model * self.shape.itemsize

    @property
    def row_bytes(self) -> float:
        """Of T, the full send buffers for all tokens of a tensor group."""
        return self.shape.buffer_factor * self.shape.top_k * self.token_bytes

    def gathered_tokens(self, axes: str) -> Term:
        """In the end, and for the split when going back; nothing needs it again."""
        group, count = self.shape.groups[axes], 1 + self.shape.is_training
        return self.collective("all_gather", group, self.token_bytes, count, "tokens")

    def routed(self, tokens: float, sources: Mapping[str, int]) -> tuple[Term, Term]:
        """Router, and its counts of rows for each expert, known to all afterwards."""
        s, count = self.shape, 1 + 2 * self.shape.is_training
        flops = count * 2 * tokens * s.d_model * s.num_experts
        size = num_devices(sources) * s.num_experts * COUNT_BYTES
        return (
            Term("router", count, 0.0, flops / self.calibration.flops_per_sec),
            self.collective("all_gather", sources, size, 1, "counts"),
        )

    def experts(self, rows: float, width: float) -> Term:
        """SwiGLU of this hidden width: three matrices, 2 FLOPs a weight."""
        count = self.shape.num_computed
        flops = count * 6 * rows * self.shape.d_model * width
        return Term("experts", count, 0.0, flops / self.calibration.flops_per_sec)

    def weights(self, group: Mapping[str, int], experts: float) -> tuple[Term, Term]:
        """Of so many whole experts, parts of which lie along the group."""
        s = self.shape
        size = experts * 3 * s.d_model * s.d_expert * s.itemsize
        back = int(s.is_training)
        return (
            self.collective("all_gather", group, size, s.num_fetched, "weights"),
            self.collective("reduce_scatter", group, size, back, "weights"),
        )

    def computed(self, times: float = 1.0) -> tuple[Term, ...]:
        """Shards of experts, by each of which a row is computed `times` times, and
        their weights, over data unless data is part of the group."""
        s = self.shape
        rows = times * s.top_k * s.tokens * s.expert_shards / s.tensor
        data = 1 if "data" in s.sizes else self.calibration.mesh["data"]
        owned = s.num_experts / num_devices(s.groups["owners"]) / s.expert_shards
        weights = self.weights({"data": data}, owned)
        return self.experts(rows, s.d_expert / s.expert_shards), *weights


def _s1(p: _Parts) -> tuple[Term, ...]:
    s, everyone = p.shape, p.shape.groups["everyone"]
    sent = p.row_bytes * s.expert_shards / s.tensor
    return (
        p.collective("all_to_all", everyone, sent, 2 * s.num_exchanged),
        p.gathered_tokens("tensor"),
        *p.routed(s.tokens / s.tensor, everyone),
        *p.computed(),
    )


def _s1h(p: _Parts) -> tuple[Term, ...]:
    s, g, passes = p.shape, p.shape.groups, p.shape.num_exchanged
    sent = p.row_bytes / s.tensor
    whole = sent * s.expert_shards
    return (
        p.collective("all_to_all", g["owners"], sent, 2 * passes),
        p.collective("all_gather", g["shards"], whole, passes, "rows"),
        p.collective("reduce_scatter", g["shards"], whole, passes, "rows"),
        p.gathered_tokens("tensor"),
        *p.routed(s.tokens / s.tensor, g["everyone"]),
        *p.computed(),
    )


def _s2(p: _Parts) -> tuple[Term, ...]:
    s, g, passes = p.shape, p.shape.groups, p.shape.num_exchanged
    sent = p.row_bytes * s.expert_shards / s.tensor
    travel = p.collective("all_to_all", g["everyone"], sent, 2 * passes)
    gather = p.collective("all_gather", g["tensor"], p.row_bytes, passes, "rows")
    hidden_sec = s.overlap * min(travel.sec / 2, gather.sec)
    return (
        travel,
        gather,
        Term("hidden under all_to_all", passes * (hidden_sec > 0), 0.0, -hidden_sec),
        *p.routed(s.tokens, s.sizes),
        *p.computed(),
    )


def _base(p: _Parts) -> tuple[Term, ...]:
    """Outer parts of tensor split tokens, and gather last; `within` has gradients."""
    s, g, passes = p.shape, p.shape.groups, p.shape.num_exchanged
    part = s.expert_shards * min(1.0, s.expert_shards / s.tensor)
    back, whole = int(s.is_training), p.token_bytes * num_devices(g["within"])
    tokens, rows = p.token_bytes * part, p.row_bytes * part
    return (
        p.collective("all_gather", g["shards"], tokens, passes - back, "tokens"),
        p.collective("all_gather", g["within"], whole, back, "gradients"),
        p.collective("all_to_all", g["owners"], rows, 2 * passes),
        p.collective("all_reduce", g["shards"], rows, passes, "rows"),
        p.gathered_tokens("outer"),
        *p.routed(s.tokens * part, g["owners"]),
        *p.computed(times=min(s.tensor, s.expert_shards)),
    )


def _local(p: _Parts) -> tuple[Term, ...]:
    s, tensor = p.shape, p.shape.groups["tensor"]
    apart = {"data": p.calibration.mesh["data"], **s.sizes}
    return (
        p.collective("all_reduce", tensor, p.token_bytes, 1 + s.is_training, "tokens"),
        *p.routed(s.tokens, {}),
        p.experts(s.top_k * s.tokens / s.tensor, s.d_expert),
        *p.weights(apart, s.num_experts / s.tensor),
    )


TIMES = {"s1h": _s1h, "s1": _s1, "s2": _s2, "base": _base, "local": _local}
"""Each schedule's time as a sum of terms; of equally fast ones the first is taken."""
