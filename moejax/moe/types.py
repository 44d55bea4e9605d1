"""Pytrees that live on devices: what the parts of an MoE layer hand to one another."""

import jax
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from moejax.plan.edge_coloring import edge_coloring
from moejax.plan.expert_plan import ExpertPlan, copy_tables
from moejax.plan.layout import Layout


@struct.dataclass
class Windows:
    """Rows of a batch as the data gives them; leading dims may come before [b, t + 1].

    A position counts from the start of the token's document, or of the window where the
    document began before it: 0 marks an edge between documents.
    """

    token_bt: Int[Array, "b t+1"]
    position_bt: Int[Array, "b t+1"]


@struct.dataclass
class Batch:
    """Token ids of one step: position t predicts position t + 1 of its window."""

    tokens_bt: Int[Array, "b t"]
    targets_bt: Int[Array, "b t"]
    position_bt: Int[Array, "b t"]
    """Of the tokens, in their documents."""

    @classmethod
    def from_windows(cls, windows: Windows) -> "Batch":
        token_bt, position_bt = windows.token_bt, windows.position_bt
        return cls(token_bt[:, :-1], token_bt[:, 1:], position_bt[:, :-1])


@struct.dataclass
class Placement:
    """An ExpertPlan as arrays; swapped between two steps without a recompilation.

    Slots stand twice: by number (p), and by expert (q: sorted by expert, then by slot,
    empty ones last). With domains q counts slots as rows see them (Layout.exchanged).
    A scan over layers takes the leading dim away.
    """

    slot_to_expert_lp: Int[Array, "l p"]
    slot_lq: Int[Array, "l q"]
    """Number of the q-th slot."""
    expert_lq: Int[Array, "l q"]
    """Its expert, -1 where it is empty."""
    replica_lq: Int[Array, "l q"]
    """Which of its expert's replicas it is, counted from 0."""
    local_lq: Int[Array, "l q"]
    """Which of those on its own device."""
    color_lq: Int[Array, "l q"]
    """moejax.plan.edge_coloring: what water-filling may set at the same time, -1 where
    it has no choice."""
    num_colors_l: Int[Array, " l"]
    owned_le: Int[Array, "l e"]
    """Expert whose masters lie at each position: ExpertPlan.owned_le."""
    offer_lwo: Int[Array, "l w o"]
    """Copies, if the store has them: moejax.plan.expert_plan.CopyTables."""
    want_lwc: Int[Array, "l w c"]
    fill_lws: Int[Array, "l w s"]

    @classmethod
    def from_plan(cls, plan: ExpertPlan, layout: Layout) -> "Placement":
        """NumPy arrays of a plan that is valid for the layout; the caller places them
        on devices."""
        layers = [
            _by_expert(_as_gathered(row_p, layout), layout.exchanged)
            | copy_tables(row_p, owned_e, layout)._asdict()
            for row_p, owned_e in zip(plan.slot_to_expert_lp, plan.owned_le)
        ]
        tables = {name: np.stack([row[name] for row in layers]) for name in layers[0]}
        return cls(
            slot_to_expert_lp=plan.slot_to_expert_lp,
            slot_lq=tables["slot_q"],
            expert_lq=tables["expert_q"],
            replica_lq=tables["replica_q"],
            local_lq=tables["local_q"],
            color_lq=tables["color_q"],
            num_colors_l=tables["color_q"].max(axis=1) + 1,
            owned_le=plan.owned_le,
            offer_lwo=tables["offer_wo"],
            want_lwc=tables["want_wc"],
            fill_lws=tables["fill_ws"],
        )

    def layer(self, index: int) -> "Placement":
        """Of one layer, as an MoE layer takes it."""
        return jax.tree.map(lambda leaf: leaf[index], self)


def _as_gathered(row_p: np.ndarray, layout: Layout) -> np.ndarray:
    """Slots of all devices in the order of domains, each as its devices gather it."""
    if layout.domain is None:
        return row_p
    row_ws = row_p.reshape(layout.num_devices, -1)
    return np.concatenate(
        [row_ws[members].ravel() for members in layout.domain.members()]
    )


def _by_expert(row_p: np.ndarray, layout: Layout) -> dict[str, np.ndarray]:
    """Tables of one layer's slots, sorted by expert; int32."""
    slot_q = np.argsort(np.where(row_p < 0, layout.num_experts, row_p), kind="stable")
    expert_q, device_q = row_p[slot_q], slot_q // layout.slots_per_device
    new_q = np.r_[True, expert_q[1:] != expert_q[:-1]]
    there_q = new_q | np.r_[True, device_q[1:] != device_q[:-1]]
    index_q = np.arange(len(row_p))
    first_q, here_q = (
        np.maximum.accumulate(np.where(starts_q, index_q, 0))
        for starts_q in (new_q, there_q)
    )
    tables = {
        "slot_q": slot_q,
        "expert_q": expert_q,
        "replica_q": index_q - first_q,
        "local_q": index_q - here_q,
        "color_q": edge_coloring(row_p, layout.num_devices)[slot_q],
    }
    return {name: table.astype(np.int32) for name, table in tables.items()}


@struct.dataclass
class Routes:
    """Who computes each local token. `expert_nk` is -1 where a choice is empty."""

    expert_nk: Int[Array, "n k"]
    gate_nk: Float[Array, "n k"]


@struct.dataclass
class LayerSums:
    """One device's addends to the losses and statistics of a layer.

    They leave shard_map with a leading device dim and are added once for all layers, so
    that no layer waits for a reduction that only the loss needs.
    """

    prob_e: Float[Array, " e"]
    entropy: Float[Array, ""]
    sequence: Float[Array, ""]
    z: Float[Array, ""]
    tokens_e: Int[Array, " e"]
    rows: Int[Array, ""]
    rounds: Int[Array, ""]
    dropped: Int[Array, ""]
    fullest_pair: Int[Array, ""]
    bound: Int[Array, ""]


@struct.dataclass
class RouterLosses:
    """Unweighted, one value per layer; `balance` is 1.0 when loads are even."""

    balance: Float[Array, ""]
    sequence_balance: Float[Array, ""]
    z: Float[Array, ""]
    mutual_information: Float[Array, ""]
    """Of token and expert, negative: nats by which a token tells its expert."""


@struct.dataclass
class RoutingStats:
    """Integers about the MoE layers of one step, over the global batch."""

    tokens_lwe: Int[Array, "l w e"]
    """Choices of each expert by the device that made them, before any drop; w counts
    all devices that split the batch, the expert axis innermost."""
    rows_lw: Int[Array, "l w"]
    """Rows that each of those devices computed."""
    rounds_l: Int[Array, " l"]
    """Passes of the exchange: 1 when every row fitted into round 0."""
    dropped_l: Int[Array, " l"]
    """Choices that capacity mode dropped; 0 in exact mode."""
    fullest_pair_l: Int[Array, " l"]
    """Most rows that one device had for one other."""
    fullest_device_l: Int[Array, " l"]
    """Rows of the fullest device of each micro-batch, summed over those."""
    bound_l: Int[Array, " l"]
    """Certificates, summed likewise: no split over these replicas leaves the fullest
    device of a micro-batch fewer rows. The mean, for splits that look for none."""

    @property
    def tokens_le(self):
        """Load: choices of each expert in the global batch."""
        return self.tokens_lwe.sum(axis=1)
