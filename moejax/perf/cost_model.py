"""What a plan costs, in seconds: compute, rows on the wire, weights out and gradients
back, moved owners, and a compile.

    T_FEC   forward time of the fullest device            compute_sec
    T_A2A   one exchange of rows in the group             wire_sec
    T_sync  weights to copies, gradients back, exposed    sync_sec
    layer   3 T_FEC + 4 T_A2A + T_sync                    layer_sec

Backward takes twice the forward time, and a step exchanges rows four times: dispatch,
combine and their transposes (Pro-Prophet, arXiv 2411.10003, Eq. 1-3 and 8). Loads are
rows per step: all micro-batches summed.
"""

import dataclasses

import numpy as np

from moejax.perf.traffic import device_rows, pair_rows, rows_by_slot
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.plan.owner_moves import num_rounds

ROUNDING = 1e-9
"""Shares of whole rows are sums of fractions: this much over is not a row more."""


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Speeds of one device and sizes of one expert. All times are in seconds."""

    flops_per_row: float
    """Forward, of one row through one expert."""
    bytes_per_row: float
    """On the wire."""
    bytes_per_expert: float
    """Weights in the compute dtype."""
    bytes_per_move: float
    """Masters and moments of one expert."""
    flops_per_sec: float
    bytes_per_sec: float
    """Of one device in one direction, in an all_to_all of the group."""
    latency_sec: float = 0.0
    """Of one collective."""
    other_sec: float = 0.0
    """Forward time of the rest of a block (attention), per micro-batch."""
    compile_sec: float = 0.0
    """What a relayout is charged."""
    micro_batches: int = 1
    gather_sec: float = 0.0
    """To gather one slot over the data axis, or to scatter its gradient; 0 in groups
    that data belongs to."""
    remat: str = "none"
    """Model.remat: what the backward pass does again. 'dispatch' repeats experts and
    copies, 'full' exchanges rows again too."""

    @property
    def num_computed(self) -> int:
        """Forward times of the experts in a step: forward, twice that back, again."""
        return 3 + (self.remat != "none")

    @property
    def num_exchanged(self) -> int:
        """Exchanges of rows in a step: out and home, their transposes, again."""
        return 6 if self.remat == "full" else 4

    @property
    def num_fetched(self) -> int:
        """How often slots are made in a step, where the layer makes them."""
        return 1 + (self.remat != "none")

    def compute_sec(self, rows_w: np.ndarray) -> float:
        """Forward time of the fullest device (T_FEC)."""
        return float(rows_w.max()) * self.flops_per_row / self.flops_per_sec

    def wire_sec(self, pair_ww: np.ndarray, layout: Layout) -> float:
        """One exchange of rows in each micro-batch (T_A2A).

        ragged: the device that sends or receives most to or from others decides.
        padded: whole buffers travel. In both the fullest pair, a device with itself
        included, decides how many rounds.
        """
        if layout.num_devices == 1:
            return 0.0
        per_micro_batch_ww = layout.source_share * pair_ww / self.micro_batches
        rounds, rows = _padded(float(per_micro_batch_ww.max()), layout)
        if layout.transport == "ragged":
            rows = _max_off_device(per_micro_batch_ww)
        sec = rows * self.bytes_per_row / self.bytes_per_sec + rounds * self.latency_sec
        return self.micro_batches * sec

    def sync_sec(self, layout: Layout, forward_sec: float = 0.0) -> float:
        """Weights out and gradients back of one layer, as far as nothing hides them.

        Owners scatter slices of what they offer and devices gather slices of their
        copies, so the budgets of the layout decide, not the plan. Resident copies
        travel once a step; transient ones and sharded slots in every micro-batch.
        Prefetched copies hide under the experts (`forward_sec` = T_FEC) and the rest
        of the block: Pro-Prophet, Eq. 8.
        """
        w = layout.num_devices
        if layout.store == "sharded":
            num_experts, num_collectives = layout.slots_per_device, 1
        else:
            num_experts = layout.offers_per_device + layout.copies_per_device
            num_collectives = 2
        if num_experts == 0 or w == 1:
            return 0.0
        sent_bytes = num_experts * self.bytes_per_expert * (w - 1) / w
        back_sec = sent_bytes / self.bytes_per_sec + num_collectives * self.latency_sec
        if layout.store != "resident":
            back_sec *= self.micro_batches
        out_sec = back_sec
        if layout.store != "resident" and not layout.prefetch:
            out_sec *= self.num_fetched
        if not layout.prefetch:
            return out_sec + back_sec
        hidden_sec = forward_sec + self.micro_batches * self.other_sec
        return max(0.0, out_sec - hidden_sec) + max(0.0, out_sec - 2 * hidden_sec)

    def layer_sec(
        self, load_we: np.ndarray, row_p: np.ndarray, layout: Layout
    ) -> float:
        """One layer, one step, under slots `row_p`: 3 T_FEC + 4 T_A2A + sync without
        remat, and slots gathered over data in each micro-batch."""
        rows_wp = rows_by_slot(load_we, row_p, layout.num_devices, layout.split)
        forward_sec = self.compute_sec(device_rows(rows_wp))
        wire_sec = self.wire_sec(pair_rows(rows_wp), layout)
        whole = layout.slots_per_device
        if layout.split == "dynamic":  # copies travel whole
            whole = layout.experts_per_device
        gathered = self.micro_batches * (1 + self.num_fetched) * whole
        return (
            self.num_computed * forward_sec
            + self.num_exchanged * wire_sec
            + self.sync_sec(layout, forward_sec)
            + gathered * self.gather_sec
        )

    def step_sec(self, load_lwe: np.ndarray, plan: ExpertPlan, layout: Layout) -> float:
        """All MoE layers of one step."""
        return sum(
            self.layer_sec(load_we, row_p, layout)
            for load_we, row_p in zip(load_lwe, plan.slot_to_expert_lp, strict=True)
        )

    def move_sec(
        self,
        current: ExpertPlan,
        new: ExpertPlan,
        layout: Layout,
        old_layout: Layout | None = None,
    ) -> float:
        """Masters and moments on their way to new owners: in each round a device sends
        the slices of one expert and takes those of one (moejax.plan.owner_moves).

        Copies cost nothing here: they travel in each step anyway. With `old_layout`, a
        change between lying by expert and lying by hidden width moves everything once.
        """
        w, own = layout.num_devices, layout.experts_per_device
        stores = {layout.store, (old_layout or layout).store}
        if "sharded" in stores:
            moved = 0.0 if stores == {"sharded"} else own * (w - 1) / w
            moved *= new.num_layers
        else:
            rounds = num_rounds(current.owned_le, new.owned_le, w)
            moved = 2 * rounds * (w - 1) / w
        return moved and moved * self.bytes_per_move / self.bytes_per_sec

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)


def tight(layout: Layout, plan: ExpertPlan) -> Layout:
    """`layout` with budgets of just what `plan` needs; where the step plans (split
    'dynamic'), what they are."""
    if not layout.has_copies or layout.split == "dynamic":
        return layout
    needs = plan.needs(layout.num_devices)
    return dataclasses.replace(
        layout, offers_per_device=needs.offers, copies_per_device=needs.copies
    )


def _max_off_device(pair_ww: np.ndarray) -> float:
    here_w = np.diagonal(pair_ww)
    sent_w, received_w = pair_ww.sum(axis=1), pair_ww.sum(axis=0)
    return float(np.maximum(sent_w - here_w, received_w - here_w).max())


def _padded(fullest_pair: float, layout: Layout) -> tuple[int, int]:
    """Rounds, and rows that a device sends in all of them."""
    left = fullest_pair - layout.rows_per_peer - ROUNDING * fullest_pair
    later = 0
    if left > 0 and layout.exchange == "exact":
        later = int(np.ceil(left / layout.rows_per_round))
    rows = layout.rows_per_peer + later * layout.rows_per_round
    return 1 + later, (layout.num_devices - 1) * rows


NOTES = CostModel(
    flops_per_row=4 * 1536 * 3072,
    bytes_per_row=2 * 1536,
    bytes_per_expert=2 * 2 * 1536 * 3072,
    bytes_per_move=12 * 2 * 1536 * 3072,
    flops_per_sec=50e12,
    bytes_per_sec=12.5e9,
)
"""The preset that policies are compared under: d=1536, f=3072, fp16, two matrices per
expert, 50 TFLOP/s, 12.5 GB/s, no latency, and no attention to hide copies under."""
