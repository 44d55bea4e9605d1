"""Predicted cost of a plan in seconds: compute, communication of rows, of weights and
of gradients, moves of owners, and compilation.

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

from moejax.perf.traffic import device_rows, fullest_pair, pair_rows, rows_by_slot
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.plan.owner_moves import num_rounds
from moejax.rich import shown_by

ROUNDING = 1e-9
"""Relative rounding error of a sum of shares of rows. A sum that exceeds a whole number
by less does not need one more row."""


@shown_by("cost_model")
@dataclasses.dataclass(frozen=True)
class CostModel:
    """Speeds of one device and sizes of one expert. All times are in seconds."""

    flops_per_row: float
    """Forward FLOPs of one row through one expert."""
    bytes_per_row: float
    """Bytes of a row that travels."""
    bytes_per_expert: float
    """Bytes of one expert's weights in the compute dtype."""
    bytes_per_move: float
    """Bytes of the float32 master parameters and moments of one expert."""
    flops_per_sec: float
    """Throughput of one device in the experts' products."""
    bytes_per_sec: float
    """Bytes that leave one device per second, in an all_to_all of the group."""
    latency_sec: float = 0.0
    """Latency of one collective."""
    other_sec: float = 0.0
    """Forward time of the rest of a block (attention), per micro-batch."""
    compile_sec: float = 0.0
    """Time to compile a step, which a relayout is charged."""
    micro_batches: int = 1
    """Number of micro-batches per step."""
    gather_sec: float = 0.0
    """Time to gather one slot over the data axis, or to scatter its gradient; 0 in
    groups that data belongs to."""
    loop_sec: float = 0.0
    """Time for which the host waits at a loop whose number of rounds only the devices
    know, before it can launch what follows."""
    overlaps: bool = True
    """Whether collectives run beside other work of a device. On CPUs they do not."""
    remat: str = "none"
    """Copy of Model.remat: what the backward pass repeats. 'dispatch' repeats experts
    and copies; 'full' repeats the exchange of rows too."""

    @property
    def num_computed(self) -> int:
        """Time of the experts in a step, as a multiple of their forward time."""
        return 3 + (self.remat != "none")

    @property
    def num_exchanged(self) -> int:
        """Number of exchanges of rows in a step: dispatch, combine, their transposes,
        and with remat 'full' dispatch and combine again."""
        return 6 if self.remat == "full" else 4

    @property
    def num_fetched(self) -> int:
        """Number of times in a step that a layer makes its own slots."""
        return 1 + (self.remat != "none")

    def loops_sec(self, num_layers: int) -> float:
        """Return the time for which the host waits at the later rounds of a step, which
        are two loops in each layer of a micro-batch: forward and backward."""
        return 2 * num_layers * self.micro_batches * self.loop_sec

    def compute_sec(self, rows_w: np.ndarray) -> float:
        """Return the forward time of the fullest device (T_FEC)."""
        return float(rows_w.max()) * self.flops_per_row / self.flops_per_sec

    def wire_sec(self, pair_ww: np.ndarray, layout: Layout) -> float:
        """Return the time of one exchange of rows in each micro-batch (T_A2A), with
        halves that of both.

        With ragged transport the device that sends or receives most, to or from others,
        decides how many rows travel; with padded transport whole buffers travel. In
        both the fullest pair of devices decides the number of rounds. A device and
        itself are a pair too.
        """
        if layout.num_devices == 1:
            return 0.0
        num_exchanges = self.micro_batches * layout.num_exchanges
        per_exchange_ww = layout.source_share * pair_ww / num_exchanges
        most = _max_off_device(per_exchange_ww)
        fullest = fullest_pair(per_exchange_ww, layout)
        return self._exchanges_sec(fullest, most, layout)

    def _exchanges_sec(self, fullest: float, most_rows: float, layout: Layout) -> float:
        """Return the time of one exchange of rows in each micro-batch, with the rows of
        the fullest pair of devices in each, and the most rows of one device to or from
        others."""
        num_exchanges = self.micro_batches * layout.num_exchanges
        rounds, rows = _padded(fullest, layout)
        if layout.transport == "ragged":
            rows = most_rows
        sec = rows * self.bytes_per_row / self.bytes_per_sec + rounds * self.latency_sec
        return num_exchanges * sec

    def sync_sec(self, layout: Layout, forward_sec: float = 0.0) -> float:
        """Return the exposed time in which one layer's weights reach their slots and
        the gradients return, in one step.

        Owners scatter slices of the experts that they offer, and devices gather slices
        of their copies, so that the budgets of the layout decide, not the plan.
        Resident copies travel once a step; transient copies and sharded slots travel in
        each micro-batch. So do slots that are gathered over data, unless that is done
        once a step (Layout.gather).

        Where collectives overlap other work, what is prefetched hides under the experts
        (`forward_sec` = T_FEC) and the rest of the block: Pro-Prophet, Eq. 8. The
        backward pass has twice that work, and with remat once more, under which slots
        that it fetches again hide too.
        """
        each_layer_sec, once_sec = self._copies_sec(layout), 0.0
        if layout.store == "resident":
            each_layer_sec, once_sec = 0.0, 2 * each_layer_sec
        if layout.gather == "step":
            once_sec += self.gathers_sec(layout)
        else:
            each_layer_sec += self.num_gathers(layout)[1] * self.gather_sec
        back_sec = self.num_fetched * each_layer_sec  # gradients, and slots again
        if not (layout.prefetch and self.overlaps):
            return once_sec + each_layer_sec + back_sec
        work_sec = forward_sec + self.micro_batches * self.other_sec
        hidden_sec = min(each_layer_sec, work_sec)
        hidden_sec += min(back_sec, (1 + self.num_fetched) * work_sec)
        return once_sec + each_layer_sec + back_sec - hidden_sec

    def _copies_sec(self, layout: Layout) -> float:
        """Return the time in which one layer's weights travel to their slots within the
        group, in one step, or their gradients back."""
        w = layout.num_devices
        if layout.store == "sharded":
            num_experts, num_collectives = layout.slots_per_device, 1
        else:
            num_experts = layout.offers_per_device + layout.copies_per_device
            num_collectives = 2
        if num_experts == 0 or w == 1:
            return 0.0
        sent_bytes = num_experts * self.bytes_per_expert * (w - 1) / w
        sec = sent_bytes / self.bytes_per_sec + num_collectives * self.latency_sec
        if layout.makes_replicas:  # each exchange chooses its own copies
            sec *= layout.num_exchanges
        return sec if layout.store == "resident" else self.micro_batches * sec

    def layer_sec(
        self, load_we: np.ndarray, row_p: np.ndarray, layout: Layout
    ) -> float:
        """Return the time of one layer in one step, with the slots `row_p`.

        Without remat that is 3 T_FEC + 4 T_A2A + T_sync.
        """
        forward_sec, wire_sec, sync_sec, _ = self._layer_secs(load_we, row_p, layout)
        return (
            self.num_computed * forward_sec + self.num_exchanged * wire_sec + sync_sec
        )

    def _layer_secs(
        self, load_we: np.ndarray, row_p: np.ndarray, layout: Layout
    ) -> tuple[float, float, float, float]:
        """Return T_FEC, T_A2A and T_sync of one layer, and the forward time of a device
        with the mean number of rows."""
        rows_wp = rows_by_slot(load_we, row_p, layout.num_devices, layout.split)
        rows_w = device_rows(rows_wp)
        forward_sec = self.compute_sec(rows_w)
        wire_sec = self.wire_sec(pair_rows(rows_wp), layout)
        mean_sec = float(rows_w.mean()) * self.flops_per_row / self.flops_per_sec
        return forward_sec, wire_sec, self.sync_sec(layout, forward_sec), mean_sec

    def counted_step_parts(
        self,
        mean_rows_l: np.ndarray,
        fullest_rows_l: np.ndarray,
        fullest_pair_l: np.ndarray,
        layout: Layout,
        num_blocks: int,
    ) -> "StepParts":
        """Return the time of a step's blocks by parts, from rows that the step has
        counted in each MoE layer.

        `mean_rows_l` are the rows of a device, `fullest_rows_l` those of the fullest
        one, both summed over exchanges, and `fullest_pair_l` those of the fullest pair
        in one exchange. With ragged transport the fullest device is taken to have
        received a share of (w - 1) / w.
        """
        row_sec, w = self.flops_per_row / self.flops_per_sec, layout.num_devices
        num_exchanges = self.micro_batches * layout.num_exchanges
        wires_sec = copies_sec = 0.0
        for rows, pair in zip(fullest_rows_l.tolist(), fullest_pair_l.tolist()):
            copies_sec += self.sync_sec(layout, rows * row_sec)
            if w > 1:
                received = rows / num_exchanges * (w - 1) / w
                wires_sec += self._exchanges_sec(pair, received, layout)
        waits_l = np.maximum(fullest_rows_l - mean_rows_l, 0)
        return StepParts(
            experts=self.num_computed * float(mean_rows_l.sum()) * row_sec,
            wait=self.num_computed * float(waits_l.sum()) * row_sec,
            wires=self.num_exchanged * wires_sec,
            copies=copies_sec,
            blocks=self._blocks_sec(num_blocks),
        )

    def num_gathers(self, layout: Layout) -> tuple[int, int]:
        """Return how many slots one layer gathers over data in one step, and of how
        many it scatters the gradients: in each micro-batch, or once (Layout.gather)."""
        whole = layout.slots_per_device
        if layout.makes_replicas:  # copies travel whole
            whole = layout.experts_per_device
        if layout.gather == "step":
            return whole, whole
        return self.micro_batches * self.num_fetched * whole, self.micro_batches * whole

    def gathers_sec(self, layout: Layout) -> float:
        """Return the time in which one layer gathers its slots over data, and scatters
        their gradients, in one step."""
        return sum(self.num_gathers(layout)) * self.gather_sec

    def step_sec(self, load_lwe: np.ndarray, plan: ExpertPlan, layout: Layout) -> float:
        """Return the time of all MoE layers in one step."""
        return sum(
            self.layer_sec(load_we, row_p, layout)
            for load_we, row_p in zip(load_lwe, plan.slot_to_expert_lp, strict=True)
        )

    def step_parts(
        self,
        load_lwe: np.ndarray,
        plan: ExpertPlan,
        layout: Layout,
        num_blocks: int = 0,
    ) -> "StepParts":
        """Return the time of a step's blocks by parts, for loads and a plan. Without
        blocks, the parts add up to `step_sec`."""
        forward_sec, wire_sec, copies_sec, mean_sec = np.sum(
            [
                self._layer_secs(load_we, row_p, layout)
                for load_we, row_p in zip(load_lwe, plan.slot_to_expert_lp, strict=True)
            ],
            axis=0,
        ).tolist()
        return StepParts(
            experts=self.num_computed * mean_sec,
            wait=self.num_computed * (forward_sec - mean_sec),
            wires=self.num_exchanged * wire_sec,
            copies=copies_sec,
            blocks=self._blocks_sec(num_blocks),
        )

    def _blocks_sec(self, num_blocks: int) -> float:
        """Return the time of the rest of the blocks in a step."""
        num_passes = 3 + (self.remat == "full")
        return num_passes * num_blocks * self.micro_batches * self.other_sec

    def move_sec(
        self,
        current: ExpertPlan,
        new: ExpertPlan,
        layout: Layout,
        old_layout: Layout | None = None,
    ) -> float:
        """Return the time in which master parameters and moments move to new owners.

        In each round a device sends the slices of one expert and receives those of one
        (moejax.plan.owner_moves). Copies cost nothing here, since they travel in each
        step anyway. If the store of `old_layout`
        splits parameters by expert and that of `layout` by hidden width, or the other
        way round, everything moves once.
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
        """Return all fields by name."""
        return dataclasses.asdict(self)


@shown_by("step_parts")
@dataclasses.dataclass(frozen=True)
class StepParts:
    """Modelled seconds of a step's blocks, by what takes them. Embedding, head,
    optimizer and gradients of dense parameters are in none of them."""

    experts: float
    """Experts, if every device had the mean number of rows."""
    wait: float
    """Waiting for the fullest device of each layer."""
    wires: float
    """Exchanges of rows."""
    copies: float
    """Weights that travel to slots and gradients that return, as far as no other work
    hides them."""
    blocks: float
    """The rest of the blocks, such as attention."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.experts + self.wait + self.wires + self.copies + self.blocks


def tight(layout: Layout, plan: ExpertPlan) -> Layout:
    """Return `layout` with the smallest budgets of offers and copies for `plan`.

    Where the step makes the replicas (Layout.makes_replicas), budgets stay as they are.
    """
    if not layout.has_copies or layout.makes_replicas:
        return layout
    needs = plan.needs(layout.num_devices)
    return dataclasses.replace(
        layout, offers_per_device=needs.offers, copies_per_device=needs.copies
    )


def _max_off_device(pair_ww: np.ndarray) -> float:
    """Return the most rows that a device sends to others or receives from others."""
    here_w = np.diagonal(pair_ww)
    sent_w, received_w = pair_ww.sum(axis=1), pair_ww.sum(axis=0)
    return float(np.maximum(sent_w - here_w, received_w - here_w).max())


def _padded(fullest: float, layout: Layout) -> tuple[int, int]:
    """Return the number of rounds of an exchange with padded transport, and the number
    of rows that a device sends to others in all rounds, padding included."""
    left = fullest - layout.rows_per_peer - ROUNDING * fullest
    later_rounds = 0
    if left > 0 and layout.exchange == "exact":
        later_rounds = int(np.ceil(left / layout.rows_per_round))
    rows = layout.rows_per_peer + later_rounds * layout.rows_per_round
    return 1 + later_rounds, (layout.num_devices - 1) * rows


NOTES = CostModel(
    flops_per_row=4 * 1536 * 3072,
    bytes_per_row=2 * 1536,
    bytes_per_expert=2 * 2 * 1536 * 3072,
    bytes_per_move=12 * 2 * 1536 * 3072,
    flops_per_sec=50e12,
    bytes_per_sec=12.5e9,
)
"""Preset under which policies are compared: d=1536, f=3072, fp16, two matrices per
expert, 50 TFLOP/s, 12.5 GB/s, no latency, and no attention to hide copies under."""
