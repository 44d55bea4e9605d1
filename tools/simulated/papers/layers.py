"""One MoE layer of a paper, as the layout and the cost model that price it.

Papers count a row for each choice of a token, in buffers of exactly the even load, and
experts of two matrices. So a choice is a token of its own here (top_k = 1), buffers
have no margin, and bytes and FLOPs are given as the papers give them.
"""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from moejax.perf.calibration import LEAVING_SHARE, Calibration
from moejax.perf.cost_model import CostModel
from moejax.perf.layer_times import sum_sec
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import ROW_MULTIPLE, Layout
from moejax.plan.parallel import Domain, Tensor


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer with an even load and experts at home."""

    cost: CostModel
    layout: Layout
    rows: float
    """Rows of each device in a step, one for each choice."""

    @property
    def load_we(self) -> np.ndarray:
        shape = self.layout.num_devices, self.layout.num_experts
        return np.full(shape, self.rows / self.layout.num_experts)

    @property
    def prediction(self):
        """Terms of the layer in one step, forward and backward."""
        row_p = ExpertPlan.home_in(self.layout, 1).slot_to_expert_lp[0]
        return self.cost.predict(self.load_we, row_p, self.layout)

    @property
    def exchange_sec(self) -> float:
        """Seconds of the layer's exchanges in one step: four of rows."""
        units = self.layout.exchanged.num_devices
        pair_uu = np.full((units, units), self.rows / units)
        return self.cost.rows_sec(pair_uu, self.layout)

    @property
    def forward_sec(self) -> float:
        """Seconds of the forward pass: the work before the experts, experts that are
        gathered beside it, and two of four exchanges (HybridEP, Eq. 8 and 10)."""
        gathered_sec = sum_sec(self.cost.weight_terms(self.layout).ahead)
        return max(self.cost.other_sec, gathered_sec) + self.exchange_sec / 2


def equal_lines(
    sizes: Mapping[str, int], bytes_per_sec: float, latency_sec: float = 0.0
) -> Calibration:
    """Return a calibration in which all collectives have one line."""
    line = {"latency_sec": latency_sec, "bytes_per_sec": bytes_per_sec, "r2": 1.0}
    axes = dict.fromkeys(("dc", "data", "expert", "tensor"), line)
    mesh = {"dc": 1, "data": 1, "expert": 1, "tensor": 1, **sizes}
    kinds = dict.fromkeys(LEAVING_SHARE, axes)
    return Calibration("", mesh, "float32", kinds, 1.0, 1.0, 0.0, "stated")


def domain_layer(
    lines: Calibration,
    sizes: Mapping[str, int],
    domain: tuple[int, ...],
    *,
    row_bytes: float,
    expert_bytes: float,
    before_sec: float = 0.0,
    gathered_bytes: float | None = None,
) -> Layer:
    """Return a layer of HybridEP.

    `sizes` are devices along the axes of the group and `domain` those of a domain along
    each; `row_bytes` is what a device puts into one all_to_all (D), `expert_bytes` the
    size of a device's experts (P_E), `before_sec` the forward time before the experts,
    and `gathered_bytes` the size at which compressed experts travel.
    """
    w = math.prod(sizes.values())
    rows = ROW_MULTIPLE * w
    whole = tuple(sizes.values())
    layout = Layout.home(
        w, w, rows, buffer_factor=1.0, axes=tuple(sizes), prefetch=True,
        domain=Domain(whole, domain) if math.prod(domain) > 1 else None,
    )  # fmt: skip
    cost = CostModel(
        flops_per_row=0.0,
        bytes_per_row=row_bytes / rows,
        bytes_per_expert=expert_bytes if gathered_bytes is None else gathered_bytes,
        bytes_per_move=0.0,
        flops_per_sec=1.0,
        bytes_per_sec=math.inf,
        other_sec=before_sec,
        calibration=lines,
    )
    return Layer(cost, layout, rows)


def tensor_layer(
    lines: Calibration,
    *,
    schedule: str,
    tensor: int,
    shards: int,
    owners: int,
    tokens: int,
    factor: float,
    d_model: int,
    d_expert: int,
    flops_per_sec: float,
) -> Layer:
    """Return a layer of Parm: `tokens` of a tensor group, of whose buffers an even load
    takes 1 / `factor` for each of a token's choices, and `owners` groups of expert
    shards. Experts have two matrices in float32."""
    cut = Tensor(schedule, tensor, shards)
    source = tokens // cut.num_parts * cut.num_gathered
    layout = Layout.home(
        owners, owners, source, buffer_factor=factor, tensor=cut, transport="padded"
    )
    weights = 2 * d_model * d_expert // shards
    cost = CostModel(
        flops_per_row=2 * weights,
        bytes_per_row=4 * d_model,
        bytes_per_expert=4 * weights,
        bytes_per_move=0.0,
        flops_per_sec=flops_per_sec,
        bytes_per_sec=math.inf,
        tokens=tokens,
        calibration=lines,
    )
    batch_shards = owners * shards / tensor
    return Layer(cost, layout, factor * tokens * batch_shards / owners)
