"""Pytrees of device arrays that the parts of an MoE layer hand to one another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from moejax.plan.edge_coloring import edge_coloring
from moejax.plan.expert_plan import EMPTY, ExpertPlan, copy_tables
from moejax.plan.layout import Layout
from moejax.plan.units import as_gathered
from moejax.rich import shown_by


@struct.dataclass
class Windows:
    """Tokens of a batch with their positions; leading dims may come before [b, t + 1].

    A position counts from the start of the token's document, or from the start of the
    window if the document began before it. Position 0 marks the start of a document.
    """

    token_bt: Int[Array, "b t+1"]
    position_bt: Int[Array, "b t+1"]
    is_target_bt: Bool[Array, "b t+1"] | None = None
    """Whether the loss counts each token; None: it counts all."""


@struct.dataclass
class Batch:
    """Inputs and targets of one step: token t of a window predicts token t + 1."""

    tokens_bt: Int[Array, "b t"]
    targets_bt: Int[Array, "b t"]
    position_bt: Int[Array, "b t"]
    """Positions of the tokens in their documents."""

    @classmethod
    def from_windows(
        cls, windows: Windows, ends: tuple[int, int] | None = None
    ) -> "Batch":
        """Return inputs and targets: all tokens but the last, all but the first.

        `ends` are the separator and the token that ends a document: the last token of
        a document predicts that, and not the separator behind it. Windows with targets
        of their own hold no separators.
        """
        token_bt, position_bt = windows.token_bt, windows.position_bt
        targets_bt = token_bt[:, 1:]
        if ends is not None and windows.is_target_bt is None:
            separator, end = ends
            targets_bt = targets_bt + (end - separator) * (targets_bt == separator)
        return cls(token_bt[:, :-1], targets_bt, position_bt[:, :-1])


@struct.dataclass
class Placement:
    """An ExpertPlan as int32 arrays, which can be swapped without compiling.

    Slots are listed in two orders: by number (p), and by expert (q: sorted by expert,
    then by number, empty slots last). With domains, q lists all slots of a domain as
    those of one device (Layout.exchanged), and with split 'top_up' the slots for copies
    that travel in the layer, empty here. A scan over layers removes the leading dim.
    """

    slot_to_expert_lp: Int[Array, "l p"]
    slot_lq: Int[Array, "l q"]
    """Number p of the q-th slot."""
    expert_lq: Int[Array, "l q"]
    """Expert in the q-th slot, -1 where it is empty."""
    replica_lq: Int[Array, "l q"]
    """Index of the q-th slot among the replicas of its expert."""
    local_lq: Int[Array, "l q"]
    """Index of the q-th slot among the replicas of its expert on its device."""
    color_lq: Int[Array, "l q"]
    """Color of the slot: water-filling computes the shares of one color at the same
    time (moejax.plan.edge_coloring). -1 where rows have no choice of replica."""
    num_colors_l: Int[Array, " l"]
    """Number of colors."""
    owned_le: Int[Array, "l e"]
    """Expert whose parameters lie at each position: ExpertPlan.owned_le."""
    gathered_le: Int[Array, "l e"]
    """The same in the order in which the devices of each domain gather their
    experts."""
    offer_lwo: Int[Array, "l w o"]
    """Own experts that each device offers as copies, -1 for none
    (moejax.plan.expert_plan.CopyTables); no columns where the store has no copies."""
    want_lwc: Int[Array, "l w c"]
    """Offers that each device takes copies of, counted over the devices of its node,
    and then what its node takes from others; -1 for none."""
    node_offer_lmo: Int[Array, "l m o"]
    """Offers of its devices that each node sends to others, -1 for none; no columns
    where copies travel in one level (Layout.num_copy_nodes)."""
    node_want_lmc: Int[Array, "l m c"]
    """What each node takes of these, counted over all nodes; -1 for none."""
    fill_lws: Int[Array, "l w s"]
    """Source of each slot: index into a device's own experts, then its copies."""

    @classmethod
    def from_plan(cls, plan: ExpertPlan, layout: Layout) -> "Placement":
        """Return a plan that is valid for the layout as NumPy arrays; the caller puts
        them on devices."""
        layers = [
            _by_expert(as_gathered(row_p, layout), layout.exchanged.topped_up)
            | _copy_tables(row_p, owned_e, layout)
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
            gathered_le=as_gathered(plan.owned_le, layout),
            offer_lwo=tables["offer_wo"],
            want_lwc=tables["want_wc"],
            node_offer_lmo=tables["node_offer_mo"],
            node_want_lmc=tables["node_want_mc"],
            fill_lws=tables["fill_ws"],
        )

    def layer(self, index: int) -> "Placement":
        """Return the placement of one layer, without the leading dim. An int beyond the
        layers raises IndexError; JAX would take the last one."""
        num_layers = len(self.slot_to_expert_lp)
        if isinstance(index, int) and not -num_layers <= index < num_layers:
            raise IndexError(
                f"layer({index}) of a placement of {num_layers} layers: use 0 to "
                f"{num_layers - 1}"
            )
        return jax.tree.map(lambda leaf: leaf[index], self)


def _copy_tables(
    row_p: np.ndarray, owned_e: np.ndarray, layout: Layout
) -> dict[str, np.ndarray]:
    """Return the tables by which copies reach the slots of devices in one layer; those
    of domains where these are gathered before (`Layout.copies_after_gather`)."""
    if layout.copies_after_gather:
        row_p, owned_e = (as_gathered(x, layout) for x in (row_p, owned_e))
    return copy_tables(row_p, owned_e, layout.of_copies)._asdict()


def _by_expert(row_p: np.ndarray, layout: Layout) -> dict[str, np.ndarray]:
    """Return int32 tables of one layer's slots, sorted by expert. Slots of the layout
    that `row_p` does not have are empty, the last ones of each device."""
    row_ws = row_p.reshape(layout.num_devices, -1)
    num_more = layout.slots_per_device - row_ws.shape[1]
    row_ws = np.pad(row_ws, ((0, 0), (0, num_more)), constant_values=EMPTY)
    row_p = row_ws.reshape(-1)
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
    """Experts of each local token and their gates; expert -1 is an unused choice."""

    expert_nk: Int[Array, "n k"]
    gate_nk: Float[Array, "n k"]


@struct.dataclass
class LayerSums:
    """Addends of each device to the losses and statistics of a layer.

    They leave `shard_map` with a leading device dim and are added once for all layers,
    so that no layer waits for a reduction that only the loss needs.
    """

    prob_e: Float[Array, " e"]
    """Routing probability of each expert, summed over tokens."""
    entropy: Float[Array, ""]
    """Entropy of routing probabilities in nats, summed over tokens."""
    sequence: Float[Array, ""]
    """Load-balancing loss of each sequence, summed over sequences."""
    z: Float[Array, ""]
    """logsumexp(logits)^2, summed over tokens."""
    tokens_e: Int[Array, " e"]
    """Choices of each expert, before any drop."""
    rows_h: Int[Array, " h"]
    """Rows that the device computed, in each exchange of the layer: h is 1, or 2 with
    Moe.halves."""
    rounds: Int[Array, ""]
    """Passes of the exchange."""
    dropped: Int[Array, ""]
    """Choices that capacity mode dropped."""
    fullest_pair: Int[Array, ""]
    """Maximum number of rows that the device had for one other."""
    bound_h: Int[Array, " h"]
    """Lower bound on the rows of the fullest device, from the split, in each
    exchange."""
    together_ee: Int[Array, "e e"] | None = None
    """Tokens that choose both of two experts; None: the layout does not count them."""

    @property
    def rows(self) -> Int[Array, ""]:
        """Rows that the device computed, in all exchanges."""
        return jnp.sum(self.rows_h, axis=-1)

    @property
    def bound(self) -> Int[Array, ""]:
        """Lower bound on the rows of the fullest devices, summed over exchanges."""
        return jnp.sum(self.bound_h, axis=-1)

    @classmethod
    def over_parts(cls, parts: list["LayerSums"]) -> "LayerSums":
        """Return the sums of all parts of a device's tokens, of their maxima the
        largest. Exchanges are listed part after part."""
        if len(parts) == 1:
            return parts[0]
        joined = {"rows_h": jnp.concatenate, "bound_h": jnp.concatenate}
        joined |= dict.fromkeys(("rounds", "fullest_pair"), _largest)
        names = [field.name for field in dataclasses.fields(cls)]
        values = {name: [getattr(part, name) for part in parts] for name in names}
        return cls(
            **{
                name: None if each[0] is None else joined.get(name, sum)(each)
                for name, each in values.items()
            }
        )

    def over_devices(self, add=jnp.sum) -> "LayerSums":
        """Reduce every field over its device dim: [w, ..] to [..], or [l, w, ..] to
        [l, ..]. `add` is the reduction, such as jnp.max."""
        num_dims = dict.fromkeys(("prob_e", "tokens_e", "rows_h", "bound_h"), 1)
        num_dims["together_ee"] = 2
        sums = {}
        for field in dataclasses.fields(self):
            leaf = getattr(self, field.name)
            if leaf is not None:
                axis = leaf.ndim - 1 - num_dims.get(field.name, 0)
                sums[field.name] = add(leaf, axis=axis)
        return LayerSums(**sums)


def _largest(values: list[Array]) -> Array:
    """Return the largest of several numbers."""
    return jnp.max(jnp.stack(values))


@struct.dataclass
class RouterLosses:
    """Router losses of one layer, or of several in a leading dim, without weights, and
    the entropy of its choices."""

    balance: Float[Array, ""]
    """Switch's load-balancing loss over the batch; 1.0 when loads are even."""
    sequence_balance: Float[Array, ""]
    """The load-balancing loss within each sequence, averaged; 1.0 when even."""
    z: Float[Array, ""]
    """Mean of logsumexp(logits)^2."""
    mutual_information: Float[Array, ""]
    """Mutual information of token and expert in nats, negated."""
    entropy: Float[Array, ""]
    """Mean entropy of a token's choice in nats: a part of `mutual_information`, and no
    loss of its own."""


@shown_by("stats")
@struct.dataclass
class RoutingStats:
    """Integer statistics of the MoE layers in one step, over the global batch."""

    tokens_lwe: Int[Array, "l w e"]
    """Choices of each expert by the device whose tokens made them, before any drop. w
    counts all devices that split the batch, in the order of the mesh."""
    rows_lw: Int[Array, "l w"]
    """Rows that each of the devices computed."""
    rounds_l: Int[Array, " l"]
    """Passes of the exchange: 1 where every row fitted into round 0."""
    dropped_l: Int[Array, " l"]
    """Choices that capacity mode dropped; 0 in exact mode."""
    fullest_pair_l: Int[Array, " l"]
    """Maximum number of rows that one device had for one other."""
    fullest_device_l: Int[Array, " l"]
    """Rows of the fullest device, summed over exchanges: those of micro-batches, and
    with Moe.halves of each half."""
    bound_l: Int[Array, " l"]
    """Lower bound on fullest_device_l: no split over these replicas gives the fullest
    device fewer rows. The mean of rows, for splits that compute no bound."""
    together_lee: Int[Array, "l e e"] | None = None
    """Tokens of all devices that choose both of two experts, and on the diagonal loads
    (`moejax.plan.together`); None: Layout.counts_together is false."""

    @classmethod
    def from_sums(cls, sums: LayerSums) -> "RoutingStats":
        """Return the routing statistics of a step from the sums of all layers and
        devices, [l, w, ..]."""
        most, total = sums.over_devices(jnp.max), sums.over_devices()
        return cls(
            tokens_lwe=sums.tokens_e,
            rows_lw=sums.rows,
            rounds_l=most.rounds,
            dropped_l=total.dropped,
            fullest_pair_l=most.fullest_pair,
            fullest_device_l=most.rows,
            bound_l=most.bound,
            together_lee=total.together_ee,
        )

    @property
    def tokens_le(self):
        """Load of each expert: its choices in the global batch."""
        return self.tokens_lwe.sum(axis=1)
