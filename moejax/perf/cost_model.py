"""Predicted cost of a plan in seconds: compute, communication of rows, of weights and
of gradients, moves of owners, and compilation.

    T_FEC   forward time of the fullest device            compute_sec
    rows    all exchanges of rows in a step               row_terms
    T_sync  weights to slots, gradients back, exposed     sync_sec
    layer   3 T_FEC + rows + T_sync                       layer_sec

Backward takes twice the forward time, and a step exchanges rows four times: dispatch,
combine and their transposes, 4 T_A2A (Pro-Prophet, arXiv 2411.10003, Eq. 1-3 and 8). A
layout with a tensor axis has the collectives of its schedule (moejax.perf.exchange). In
a layout with domains rows travel between these, on the lines of the axes that separate
them, and a device gathers the slots of its domain. Loads are rows per step: all
micro-batches summed.

Every choice asks these functions: policies and relayouts, `'auto'` of a policy, a
schedule and a domain, when slots are gathered, and the dry run.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np

from moejax.perf import exchange, terms
from moejax.perf.calibration import (
    LEAVING_SHARE,
    Calibration,
    find_line,
    leaving_bytes,
    slower,
)
from moejax.perf.layer_times import (
    LayerTimes,
    StepParts,
    WeightTerms,
    repeated,
    sum_sec,
)
from moejax.perf.terms import Prediction, Term
from moejax.perf.traffic import (
    device_rows,
    has_copies,
    layer_rows,
    pair_rows,
    ratios_of,
    sent_rows,
)
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.groups import GROUP_AXES
from moejax.plan.layout import Layout
from moejax.plan.owner_moves import num_rounds
from moejax.plan.together import RowRatios
from moejax.rich import shown_by

ROUNDING = 1e-9
"""Relative rounding error of a sum of shares of rows. A sum that exceeds a whole number
by less does not need one more row."""
CARD_BYTES = 2 * 4
"""Bytes that travel beside a row for each choice of a token: a gate and a slot."""
BYTES_PER_MOVED_WEIGHT = 3 * 4
"""Bytes that move with a weight to another owner under AdamW: a float32 master
parameter and two float32 moments."""


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
    and copies; 'full' sends rows again too."""
    tokens: int = 0
    """Number of tokens of a tensor group in a micro-batch, which schedules gather; 0:
    they are not counted."""
    calibration: Calibration | None = None
    """Lines of collectives along each axis of the mesh. None: all have `bytes_per_sec`
    and `latency_sec`."""

    @property
    def num_computed(self) -> int:
        """Time of the experts in a step, as a multiple of their forward time."""
        return 3 + (self.remat != "none")

    @property
    def num_dispatched(self) -> int:
        """Number of times in a step that rows are sent to experts: forward, backward,
        and forward again with remat 'full'. Results return twice."""
        return 2 + (self.remat == "full")

    @property
    def num_fetched(self) -> int:
        """Number of times in a step that a layer makes its own slots."""
        return 1 + (self.remat != "none")

    def loops_sec(self, num_layers: int) -> float:
        """Return the time for which the host waits at the later rounds of a step, which
        are two loops in each layer of a micro-batch: forward and backward."""
        return 2 * num_layers * self.micro_batches * self.loop_sec

    @functools.cached_property
    def lines(self) -> Calibration:
        """Calibration that prices collectives."""
        if self.calibration is not None:
            return self.calibration
        line = {"latency_sec": self.latency_sec, "bytes_per_sec": self.bytes_per_sec}
        axes = dict.fromkeys(("dc", "data", "expert", "tensor"), line)
        kinds = dict.fromkeys(LEAVING_SHARE, axes)
        return Calibration("", {}, "float32", kinds, 1.0, 1.0, 0.0, "presumed")

    def groups(self, layout: Layout) -> dict[str, exchange.Group]:
        """Return the groups of devices that a layout's collectives join."""
        return exchange.groups_of(layout, self.lines.mesh)

    def compute_sec(self, rows_w: np.ndarray) -> float:
        """Return the forward time of the fullest device (T_FEC)."""
        return float(rows_w.max()) * self.flops_per_row / self.flops_per_sec

    def row_sec(self, layout: Layout) -> float:
        """Return the forward time of one row on a device: of its shard of an expert, or
        of a whole one with schedule 'local'."""
        shards = layout.tensor.expert_shards if layout.is_local else 1
        return shards * self.flops_per_row / self.flops_per_sec

    def row_terms(
        self, pair_uu: np.ndarray, layout: Layout, ratios: RowRatios | None = None
    ) -> tuple[Term, ...]:
        """Return the terms of all exchanges of a layer's rows in one step.

        `pair_uu` are the rows of a step from each source device to each device; with
        domains, from domain to domain (`moejax.perf.traffic.layer_rows`). With ragged
        transport the device that sends or receives most, to or from others, decides how
        many rows travel; with padded transport whole buffers travel. In both the pair
        of devices with most rows beyond round 0 decides the number of rounds.
        """
        num_exchanges = self.micro_batches * layout.num_exchanges
        per_exchange_uu = layout.source_share * pair_uu / num_exchanges
        found = sent_rows(per_exchange_uu, layout.exchanged.topped_up, ratios)
        return self._row_terms(found.left, found.off_device, layout)

    def _row_terms(
        self, left: float, off_device: float, layout: Layout
    ) -> tuple[Term, ...]:
        """Return the terms of a layer's rows in one step: `left` of a pair of devices
        remain after round 0 of each exchange, and one device has `off_device` to or
        from others."""
        view, tensor = layout.exchanged.topped_up, layout.tensor
        rounds, more = _later_rounds(left, view)
        nodes = view.num_relayed
        rows = view.rows_per_peer + nodes * more
        ragged = off_device * self.bytes_per_row
        buffer = exchange.Buffer(
            size_bytes=view.num_devices // nodes * rows * self.bytes_per_row,
            far_bytes=nodes * (view.rows_per_node + more) * self.bytes_per_row
            if view.has_levels
            else None,
            card_share=CARD_BYTES * layout.top_k / self.bytes_per_row,
            rounds=rounds,
            ragged_bytes=ragged if layout.transport == "ragged" else None,
        )
        num_exchanges = self.micro_batches * layout.num_exchanges
        passes = exchange.Passes(
            count=self.num_dispatched * num_exchanges,
            returns=2 * num_exchanges,
            forward=(self.num_dispatched - 1) * self.micro_batches,
            backward=self.micro_batches,
            token_bytes=self.tokens * self.bytes_per_row,
            tokens_count=2 * self.micro_batches * (self.tokens > 0),
        )
        schedule = None if tensor is None else tensor.schedule
        is_hierarchical = layout.transport == "hierarchical"
        found = self.groups(layout)
        return exchange.row_terms(
            schedule, buffer, passes, found, self.lines, is_hierarchical
        )

    def rows_sec(
        self, pair_uu: np.ndarray, layout: Layout, ratios: RowRatios | None = None
    ) -> float:
        """Return the time of all exchanges of a layer's rows in one step."""
        return sum(term.sec for term in self.row_terms(pair_uu, layout, ratios))

    def weight_terms(self, layout: Layout, is_topped_up: bool = False) -> WeightTerms:
        """Return the terms in which one layer's weights reach their slots and the
        gradients return, in one step.

        Owners scatter slices of the experts that they offer, and devices gather slices
        of their copies, so that the budgets of the layout decide, not the plan.
        Resident copies travel once a step; transient copies and sharded slots travel in
        each micro-batch. So do slots that are gathered over data, and those that a
        domain gathers, unless that is done once a step (Layout.keeps_slots). Compressed
        experts of a domain travel once a step. `is_topped_up` says that copies of split
        'top_up' are made: then the whole budget travels, in each exchange.
        """
        copies = self._copy_terms(layout, "weights")
        gradients = self._copy_terms(layout, "gradients")
        ahead, back, once = [], [], []
        if layout.makes_replicas or layout.store == "resident":
            once += copies + gradients  # of all micro-batches, or once a step
            if layout.makes_replicas:
                once += copies * (self.num_fetched - 1)
        else:
            ahead, back = copies, gradients + copies * (self.num_fetched - 1)
        if is_topped_up:
            budget = layout.top_up_offers, layout.top_up_copies
            moved = self._moved(layout, layout.exchanged, sum(budget), 2, "copies")
            once += [repeated(moved, layout.num_exchanges * self.micro_batches)] * (
                1 + self.num_fetched
            )
        summed = [self._dc_term(layout)]
        if layout.keeps_slots:
            once += summed
        else:
            back += summed
        domain_out, domain_back = self._domain_terms(layout)
        gathered = self._data_terms(layout, "all_gather", "weights")
        scattered = self._data_terms(layout, "reduce_scatter", "gradients")
        if layout.keeps_slots:
            once += [*domain_out, *domain_back]
        elif layout.domain is not None and layout.domain.compression is not None:
            once += domain_out
            back += domain_back
        else:
            ahead += domain_out
            back += [*domain_out * (self.num_fetched - 1), *domain_back]
        if layout.gather == "step":
            once += [gathered, scattered]
        else:
            ahead.append(gathered)
            back += [gathered] * (self.num_fetched - 1) + [scattered]
        kept = (tuple(t for t in x if t.count) for x in (ahead, back, once))
        return WeightTerms(*kept)

    def sums_along_dc(self, layout: Layout) -> bool:
        """Return whether each data centre has all experts, so that their gradients are
        summed along dc: in each micro-batch, or once a step (Layout.keeps_slots)."""
        return "dc" not in layout.axes and self.lines.mesh.get("dc", 1) > 1

    def _dc_term(self, layout: Layout) -> Term:
        """Return the term in which the float32 gradients of one layer's own experts are
        summed along dc in one step."""
        if not self.sums_along_dc(layout):
            return Term("", 0, 0.0, 0.0)
        dc, weights = self.lines.mesh["dc"], self.flops_per_row / 2
        size = layout.experts_per_device * 4 * weights / self.lines.mesh["data"]
        return terms.collective_term(
            self.lines,
            "all_reduce",
            {"dc": dc},
            leaving_bytes("all_reduce", size, dc),
            1 if layout.keeps_slots else self.micro_batches,
            "gradients",
        )

    def _copy_terms(self, layout: Layout, cargo: str) -> list[Term]:
        """Return the terms in which one layer's weights travel to their slots between
        owners, in one step, or their gradients back."""
        view = layout.of_copies
        if layout.makes_replicas:
            view = layout.exchanged
        num_experts = view.offers_per_device + view.copies_per_device
        if layout.store == "sharded":
            moved = [self._moved(layout, view, layout.slots_per_device, 1, cargo)]
        elif layout.num_copy_nodes > 1:
            moved = self._moved_in_levels(layout, cargo)
        else:
            moved = [self._moved(layout, view, num_experts, 2, cargo)]
        times = 1 if layout.store == "resident" else self.micro_batches
        if layout.makes_replicas:  # each exchange chooses its own copies
            times *= layout.num_exchanges
        return [repeated(term, times) for term in moved]

    def _moved_in_levels(self, layout: Layout, cargo: str) -> list[Term]:
        """Return the terms in which copies travel inside nodes and between these, once.
        Each device of a node sends and receives its slices of what the node does."""
        view, nodes = layout.of_copies, layout.num_copy_nodes
        per_node = view.num_devices // nodes
        owners = self.groups(layout)["owners"]
        several = [(axis, n) for axis, n in owners.items() if n > 1]
        if len(several) == 1:  # the rest is a domain, or the mesh is not known
            several = list(zip(layout.axes, (nodes, per_node)))
        sizes = dict(several[:1]), dict(several[1:])
        num_experts = (
            (view.offers_per_node + view.copies_per_node) / per_node,
            view.offers_per_device + view.copies_per_device,
        )
        found = []
        for group, n, num in zip(sizes, (nodes, per_node), num_experts):
            leaving = num * self.bytes_per_expert * (n - 1) / n / 2
            found.append(
                terms.collective_term(
                    self.lines, "all_to_all", group, leaving, 2 * (num > 0), cargo
                )
            )
        return found

    def _moved(
        self,
        layout: Layout,
        view: Layout,
        num_experts: int,
        num_collectives: int,
        cargo: str,
    ) -> Term:
        """Return the term in which a device sends this number of experts to others of
        the group once; or to other domains, where `view` is the exchanged layout."""
        w = view.num_devices
        if num_experts == 0 or w == 1:
            return Term("", 0, 0.0, 0.0)
        line = {"latency_sec": self.latency_sec, "bytes_per_sec": self.bytes_per_sec}
        along = layout.axes
        if view is not layout:
            line, owners = self._peer_line(layout), self.groups(layout)["owners"]
            along = tuple(axis for axis, n in owners.items() if n > 1)
        sent_bytes = num_experts * self.bytes_per_expert * (w - 1) / w
        sec = sent_bytes / line["bytes_per_sec"] + num_collectives * line["latency_sec"]
        name = f"all_to_all {'_'.join(along)} {cargo}"
        return Term(name, num_collectives, sent_bytes, sec)

    def _domain_terms(self, layout: Layout) -> tuple[list[Term], list[Term]]:
        """Return the terms in which a domain's devices gather one another's slots in
        one step, once, and sum their gradients."""
        if layout.domain is None:
            return [], []
        slots = layout.slots_per_device
        if layout.makes_replicas or layout.copies_after_gather:  # they are added later
            slots = layout.experts_per_device
        count, size = self.micro_batches, slots * self.bytes_per_expert
        out_count, out_size = count, size
        if layout.keeps_slots:
            count = out_count = 1
        elif layout.domain.compression is not None:
            out_count, out_size = 1, size / layout.domain.compression
        found, lines = self.groups(layout), self.lines
        return (
            exchange.domain_terms(
                out_size, found, lines, "all_gather", out_count, "experts"
            ),
            exchange.domain_terms(
                size, found, lines, "reduce_scatter", count, "gradients"
            ),
        )

    def _data_terms(self, layout: Layout, collective: str, cargo: str) -> Term:
        """Return the term in which one layer gathers its slots over the devices on
        which their width rests, in one step, once; or scatters their gradients, which
        takes as long over data."""
        times = 1 if layout.gather == "step" else self.micro_batches
        whole = times * self.num_whole(layout)
        if layout.is_local:
            mesh = self.lines.mesh
            rest = {axis: mesh.get(axis, 1) for axis in ("data", "expert")}
            size = whole * layout.tensor.expert_shards * self.bytes_per_expert
            size *= rest["data"]
            leaving = leaving_bytes(collective, size, terms.num_devices(rest)) / times
            return terms.collective_term(
                self.lines, collective, rest, leaving, times, cargo
            )
        if not self.gather_sec:
            return Term("", 0, 0.0, 0.0)
        data = self.lines.mesh.get("data", 1)
        sent = whole * (data - 1) * self.bytes_per_expert
        name = f"{collective} data {cargo}"
        return Term(name, times, sent, whole * self.gather_sec)

    def sync_sec(self, layout: Layout, forward_sec: float = 0.0) -> float:
        """Return the exposed time in which one layer's weights reach their slots and
        the gradients return, in one step (`weight_terms`).

        Where collectives overlap other work, what is prefetched hides under the experts
        (`forward_sec` = T_FEC) and the rest of the block: Pro-Prophet, Eq. 8. The
        backward pass has twice that work, and with remat once more, under which slots
        that it fetches again hide too.
        """
        found = self.weight_terms(layout)
        return found.sec - self._hidden_sec(found, layout, forward_sec)

    def _hidden_sec(
        self, found: WeightTerms, layout: Layout, forward_sec: float
    ) -> float:
        """Return the time of weights and gradients that other work hides."""
        if not (layout.prefetch and self.overlaps):
            return 0.0
        work_sec = forward_sec + self.micro_batches * self.other_sec
        hidden_sec = min(sum_sec(found.ahead), work_sec)
        return hidden_sec + min(sum_sec(found.back), (1 + self.num_fetched) * work_sec)

    def predict(
        self,
        load_we: np.ndarray,
        row_p: np.ndarray,
        layout: Layout,
        together_ee: np.ndarray | None = None,
    ) -> Prediction:
        """Return the time of one layer in one step, with the slots `row_p`, as a sum of
        named terms. Without remat that is 3 T_FEC + 4 T_A2A + T_sync. Choices count as
        independent where it is not known which experts tokens choose together."""
        layer = self._layer(load_we, row_p, layout, together_ee)
        times = self.num_computed
        wait_sec, weights = layer.forward_sec - layer.mean_sec, layer.weights
        return terms.make_prediction(
            Term("experts", times, 0.0, times * layer.mean_sec),
            Term("wait", times * (wait_sec > 0), 0.0, times * wait_sec),
            *layer.rows, *weights.ahead, *weights.back, *weights.once,
            Term("hidden under the block", int(layer.hidden_sec > 0), 0.0,
                 -layer.hidden_sec),
        )  # fmt: skip

    def layer_sec(
        self,
        load_we: np.ndarray,
        row_p: np.ndarray,
        layout: Layout,
        together_ee: np.ndarray | None = None,
    ) -> float:
        """Return the time of one layer in one step, with the slots `row_p`: the sum of
        the terms of `predict`."""
        layer = self._layer(load_we, row_p, layout, together_ee)
        return (
            self.num_computed * layer.forward_sec + sum_sec(layer.rows) + layer.sync_sec
        )

    def _layer(
        self,
        load_we: np.ndarray,
        row_p: np.ndarray,
        layout: Layout,
        together_ee: np.ndarray | None = None,
    ) -> LayerTimes:
        """Return the times of one layer in one step, with the slots `row_p`."""
        ratios = ratios_of(together_ee, row_p, layout)
        rows_up = layer_rows(load_we, row_p, layout)
        rows_u, row_sec = device_rows(rows_up), self.row_sec(layout)
        if layout.tensor is not None and layout.tensor.schedule == "base":
            rows_u = min(layout.shards) * rows_u  # copies of the same tokens
        forward_sec = float(rows_u.max()) * row_sec
        weights = self.weight_terms(layout, has_copies(rows_up, layout))
        return LayerTimes(
            mean_sec=float(rows_u.mean()) * row_sec,
            forward_sec=forward_sec,
            rows=self.row_terms(pair_rows(rows_up), layout, ratios),
            weights=weights,
            hidden_sec=self._hidden_sec(weights, layout, forward_sec),
        )

    def counted_step_parts(
        self,
        mean_rows_l: np.ndarray,
        fullest_rows_l: np.ndarray,
        fullest_pair_l: np.ndarray,
        layout: Layout,
        num_blocks: int,
    ) -> StepParts:
        """Return the time of a step's blocks by parts, from rows that the step has
        counted in each MoE layer.

        `mean_rows_l` are the rows of a device, `fullest_rows_l` those of the fullest
        one, both summed over exchanges, and `fullest_pair_l` those of the fullest pair
        in one exchange. With ragged transport the fullest device is taken to have
        received a share of (w - 1) / w.
        """
        view = layout.exchanged.topped_up
        row_sec, w = self.row_sec(layout), view.num_devices
        num_exchanges = self.micro_batches * layout.num_exchanges
        wires_sec = copies_sec = 0.0
        for rows, pair in zip(fullest_rows_l.tolist(), fullest_pair_l.tolist()):
            copies_sec += self.sync_sec(layout, rows * row_sec)
            computed = rows / num_exchanges
            share = min(1.0, view.rows_per_device / max(computed, 1.0))
            left = pair - min(pair * share, view.rows_per_peer)
            received = min(computed, pair * w) * (w - 1) / w
            wires_sec += sum_sec(self._row_terms(left, received, layout))
        waits_l = np.maximum(fullest_rows_l - mean_rows_l, 0)
        return StepParts(
            experts=self.num_computed * float(mean_rows_l.sum()) * row_sec,
            wait=self.num_computed * float(waits_l.sum()) * row_sec,
            wires=wires_sec,
            copies=copies_sec,
            blocks=self._blocks_sec(num_blocks),
        )

    def num_whole(self, layout: Layout) -> int:
        """Return how many slots one layer gathers over data at a time: those of a
        domain."""
        view = layout.exchanged
        if layout.makes_replicas:  # copies travel whole
            return view.experts_per_device
        return view.slots_per_device

    def num_gathers(self, layout: Layout) -> tuple[int, int]:
        """Return how many slots one layer gathers over data in one step, and of how
        many it scatters the gradients: in each micro-batch, or once (Layout.gather)."""
        whole = self.num_whole(layout)
        if layout.gather == "step":
            return whole, whole
        return self.micro_batches * self.num_fetched * whole, self.micro_batches * whole

    def step_sec(
        self,
        load_lwe: np.ndarray,
        plan: ExpertPlan,
        layout: Layout,
        together_lee: np.ndarray | None = None,
    ) -> float:
        """Return the time of all MoE layers in one step."""
        tables = load_lwe, plan.slot_to_expert_lp, layers_of(together_lee, plan)
        return sum(
            self.layer_sec(load_we, row_p, layout, together_ee)
            for load_we, row_p, together_ee in zip(*tables, strict=True)
        )

    def step_parts(
        self,
        load_lwe: np.ndarray,
        plan: ExpertPlan,
        layout: Layout,
        num_blocks: int = 0,
    ) -> StepParts:
        """Return the time of a step's blocks by parts, for loads and a plan. Without
        blocks, the parts add up to `step_sec`."""
        layers = [
            self._layer(load_we, row_p, layout)
            for load_we, row_p in zip(load_lwe, plan.slot_to_expert_lp, strict=True)
        ]
        mean_sec = sum(layer.mean_sec for layer in layers)
        forward_sec = sum(layer.forward_sec for layer in layers)
        return StepParts(
            experts=self.num_computed * mean_sec,
            wait=self.num_computed * (forward_sec - mean_sec),
            wires=sum(sum_sec(layer.rows) for layer in layers),
            copies=sum(layer.sync_sec for layer in layers),
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

    def between_units(self, layout: Layout) -> "CostModel":
        """Return the cost model with which a policy plans the units of a layout: rows
        travel between domains, and the members of a domain share out the weights that
        reach it."""
        if layout.domain is None:
            return self
        size, line = layout.domain_size, self._peer_line(layout)
        copied = self.bytes_per_expert
        return dataclasses.replace(
            self,
            bytes_per_expert=copied if layout.copies_after_gather else copied / size,
            bytes_per_move=self.bytes_per_move / size,
            bytes_per_sec=line["bytes_per_sec"],
            latency_sec=line["latency_sec"],
            calibration=None,
        )

    def _peer_line(self, layout: Layout) -> dict[str, float]:
        """Return the line of an all_to_all between owners, or between domains. A single
        one sends nothing."""
        owners = self.groups(layout)["owners"]
        several = terms.whole_axes(axis for axis, n in owners.items() if n > 1)
        if not several:
            return {"latency_sec": 0.0, "bytes_per_sec": math.inf}
        return find_line(self.lines, "all_to_all", several)

    def slowed(self, group: tuple[str, ...], factor: float) -> "CostModel":
        """Return the cost model in which collectives over the slowest axis of a group,
        the first of its axes with several devices, are slower by a factor."""
        several = self._several(group)
        if factor == 1.0 or self.calibration is None or not several:
            return self

        lines = slower(self.calibration, several[0], factor)
        line = find_line(lines, "all_to_all", several)
        return dataclasses.replace(
            self, calibration=lines, bytes_per_sec=line["bytes_per_sec"]
        )

    def sec_on_slowest(self, found: Prediction, group: tuple[str, ...]) -> float:
        """Return the seconds of a prediction's collectives over the slowest axis of a
        group."""
        several = self._several(group)
        return sum(found.along(axis) for axis in several[:1])

    def _several(self, group: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes of a group that have several devices."""
        return tuple(axis for axis in group if self.lines.mesh.get(axis, 1) > 1)

    def as_dict(self) -> dict:
        """Return all fields by name."""
        return dataclasses.asdict(self)


def layers_of(
    together_lee: np.ndarray | None, plan: ExpertPlan
) -> Sequence[np.ndarray | None]:
    """Return the table of each layer, or None for each where there is none."""
    return [None] * plan.num_layers if together_lee is None else together_lee


def tight(layout: Layout, plan: ExpertPlan) -> Layout:
    """Return `layout` with the smallest budgets of offers and copies for `plan`.

    Where the step makes the replicas (Layout.makes_replicas), budgets stay as they are.
    """
    if not layout.has_copies or layout.makes_replicas:
        return layout
    needs = plan.needs(layout.num_devices, layout.num_copy_nodes)
    return dataclasses.replace(layout, **needs._asdict())


def _later_rounds(left: float, layout: Layout) -> tuple[int, int]:
    """Return the number of rounds of an exchange of which `left` rows of one pair
    remain after the first, and the rows for one destination that the later ones carry
    with padded transport."""
    later = 0
    if left > ROUNDING * layout.rows_per_peer and layout.exchange == "exact":
        later = int(np.ceil(left / layout.rows_per_round - ROUNDING))
    return 1 + later, later * layout.rows_per_round


def cost_model(
    calibration: Calibration,
    *,
    d_model: int,
    d_expert: int,
    itemsize: int,
    micro_batches: int,
    other_flops_per_device: float,
    remat: str = "none",
    group: tuple[str, ...] = GROUP_AXES["expert"],
    tokens: int = 0,
    bytes_per_moved_weight: int = BYTES_PER_MOVED_WEIGHT,
) -> CostModel:
    """Return the cost model of SwiGLU experts at the calibration's speeds.

    An expert has three matrices [d_model, d_expert] and 2 FLOPs per weight and row. Its
    hidden width is split over data until a layer computes, unless data is one of the
    mesh axes of the group. `itemsize` is bytes per element in the compute dtype, and
    `other_flops_per_device` the forward FLOPs of the rest of a block on one device in
    one micro-batch. `tokens` are those of a tensor group in a micro-batch, and
    `bytes_per_moved_weight` those of a master parameter and its moments. Raises
    ValueError where the calibration lacks a line.
    """
    data = 1 if "data" in group else calibration.mesh["data"]
    weights = 3 * d_model * d_expert
    gather_sec = 0.0
    if data > 1:
        gather = find_line(calibration, "all_gather", ("data",))
        share_bytes = weights * itemsize / data
        gather_sec = (data - 1) * share_bytes / gather["bytes_per_sec"]
    line = {"latency_sec": 0.0, "bytes_per_sec": float("inf")}
    several = tuple(axis for axis in group if calibration.mesh[axis] > 1)
    if several:
        line = find_line(calibration, "all_to_all", several)
    return CostModel(
        flops_per_row=2 * weights,
        bytes_per_row=d_model * itemsize,
        bytes_per_expert=weights * itemsize / data,
        bytes_per_move=weights * bytes_per_moved_weight / data,
        flops_per_sec=calibration.flops_per_sec,
        bytes_per_sec=line["bytes_per_sec"],
        latency_sec=line["latency_sec"],
        other_sec=other_flops_per_device / calibration.flops_per_sec,
        compile_sec=calibration.compile_sec,
        micro_batches=micro_batches,
        gather_sec=gather_sec,
        overlaps=calibration.device_kind != "cpu",
        remat=remat,
        tokens=tokens,
        calibration=calibration,
    )


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
