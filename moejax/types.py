"""Pytrees that live on devices: what the parts of an MoE layer hand to one another."""

import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from moejax.layout import ExpertPlan


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
    def of_windows(cls, windows: Windows) -> "Batch":
        token_bt, position_bt = windows.token_bt, windows.position_bt
        return cls(token_bt[:, :-1], token_bt[:, 1:], position_bt[:, :-1])


@struct.dataclass
class Placement:
    """An ExpertPlan as arrays; swapped between two steps without a recompilation.

    One slot per expert, today: `expert_to_slot_le` names it.
    """

    slot_to_expert_lp: Int[Array, "l p"]
    expert_to_slot_le: Int[Array, "l e"]

    @classmethod
    def of_plan(cls, plan: ExpertPlan) -> "Placement":
        """NumPy arrays of a valid plan; the caller places them on devices."""
        table_lp = plan.slot_to_expert_lp
        slot_le = np.zeros((plan.num_layers, plan.num_experts), np.int32)
        for layer, row_p in enumerate(table_lp):
            slot_p = np.flatnonzero(row_p >= 0)
            slot_le[layer, row_p[slot_p]] = slot_p
        return cls(table_lp, slot_le)


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
    sequence: Float[Array, ""]
    z: Float[Array, ""]
    tokens_e: Int[Array, " e"]
    rounds: Int[Array, ""]
    dropped: Int[Array, ""]
    fullest_pair: Int[Array, ""]


@struct.dataclass
class RouterLosses:
    """Unweighted, one value per layer; `balance` is 1.0 when loads are even."""

    balance: Float[Array, ""]
    sequence_balance: Float[Array, ""]
    z: Float[Array, ""]


@struct.dataclass
class RoutingStats:
    """Integers about the MoE layers of one step, over the global batch."""

    tokens_le: Int[Array, "l e"]
    """Load: choices of each expert in the global batch, before any drop."""
    rounds_l: Int[Array, " l"]
    """Passes of the exchange: 1 when every row fitted into round 0."""
    dropped_l: Int[Array, " l"]
    """Choices that capacity mode dropped; 0 in exact mode."""
    fullest_pair_l: Int[Array, " l"]
    """Most rows that one device had for one other."""
