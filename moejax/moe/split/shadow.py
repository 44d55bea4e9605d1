"""Shadowing: the hottest experts copied to all devices, by the loads of a micro-batch.

    counts_we -> placement of this layer and micro-batch

The definition, in NumPy, is moejax.plan.shadowing: FasterMoE's search with current
counts. Each device computes its own rows of a shadow (split 'local_first').
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.moe.split.dynamic import EMPTY, tables_by_expert, true_indices
from moejax.moe.types import Placement
from moejax.plan.layout import Layout
from moejax.plan.shadowing import PATIENCE, toll


@jax.named_scope("shadow")
def place(
    counts_we: Int[Array, "w e"], placement: Placement, layout: Layout
) -> Placement:
    """Return a placement with copies of the experts that are worth a shadow.

    Owners are those of `placement`; copies in it are dropped. The new placement has no
    tables for water-filling (color_lq, num_colors_l stay as they were).
    """
    w, own = layout.num_devices, layout.experts_per_device
    owned_wi = placement.gathered_le.reshape(w, own)
    owner_e = jnp.argsort(placement.gathered_le).astype(jnp.int32) // own
    shadow_c = _choose(counts_we, owner_e, layout)
    is_shadow_c = shadow_c >= 0
    owner_c = owner_e[jnp.maximum(shadow_c, 0)]

    is_hit_cwi = (owned_wi == shadow_c[:, None, None]) & is_shadow_c[:, None, None]
    is_offered_wi = jnp.any(is_hit_cwi, axis=0)
    offer_wi = jnp.cumsum(is_offered_wi, axis=1, dtype=jnp.int32) - 1
    offer_c = jnp.sum(jnp.where(is_hit_cwi, offer_wi, 0), axis=(1, 2), dtype=jnp.int32)
    is_copy_wc = is_shadow_c & (owner_c != jnp.arange(w)[:, None])
    want_c = owner_c * layout.offers_per_device + offer_c
    expert_wc = jnp.where(is_copy_wc, shadow_c, EMPTY)
    copy_c = own + jnp.arange(len(shadow_c))
    own_wi = jnp.broadcast_to(jnp.arange(own), (w, own))
    row_p = jnp.concatenate([owned_wi, expert_wc], axis=1).reshape(-1)
    return placement.replace(
        slot_to_expert_lp=row_p,
        offer_lwo=true_indices(is_offered_wi, layout.offers_per_device),
        want_lwc=jnp.where(is_copy_wc, want_c, EMPTY),
        fill_lws=jnp.concatenate(
            [own_wi, jnp.where(is_copy_wc, copy_c, EMPTY)], axis=1
        ),
        **tables_by_expert(row_p, layout),
    )


def _choose(counts_we, owner_e, layout: Layout) -> Int[Array, " c"]:
    """Return the experts to shadow, the hottest first, then -1."""
    w, num_copies = layout.num_devices, layout.copies_per_device
    load_e = jnp.sum(counts_we, axis=0, dtype=jnp.int32)
    candidate_c = _candidates(load_e, owner_e, layout)
    is_real_c = candidate_c >= 0
    expert_c = jnp.maximum(candidate_c, 0)
    is_owner_cw = owner_e[expert_c][:, None] == jnp.arange(w)
    left_cw = jnp.where(is_owner_cw, load_e[expert_c][:, None], 0)
    change_cw = jnp.where(is_real_c[:, None], counts_we.T[expert_c] - left_cw, 0)
    is_owner_ew = owner_e[:, None] == jnp.arange(w)
    rows_w = jnp.sum(jnp.where(is_owner_ew, load_e[:, None], 0), 0, dtype=jnp.int32)
    rows_cw = rows_w + jnp.cumsum(change_cw, axis=0, dtype=jnp.int32)
    max_c = jnp.max(rows_cw, axis=1)
    max_rows = jnp.max(rows_w)
    least, best = max_rows + toll(max_rows, layout), jnp.int32(0)
    for c in range(num_copies):  # a few
        cost = max_c[c] + (c + 1) * layout.shadow_price
        is_better = is_real_c[c] & (c < best + PATIENCE) & (cost < least)
        least = jnp.where(is_better, cost, least)
        best = jnp.where(is_better, c + 1, best)
    return jnp.where(jnp.arange(num_copies) < best, candidate_c, EMPTY)


def _candidates(load_e, owner_e, layout: Layout) -> Int[Array, " c"]:
    """Return the experts that the budgets allow, from the most rows down, then -1."""
    order_e = jnp.argsort(-load_e, stable=True).astype(jnp.int32)
    owner_o, load_o = owner_e[order_e], load_e[order_e]
    is_before_oo = jnp.tri(len(order_e), k=-1, dtype=bool)
    is_same_oo = owner_o[:, None] == owner_o
    num_before_o = jnp.sum(is_before_oo & is_same_oo, axis=1, dtype=jnp.int32)
    may_o = (num_before_o < layout.offers_per_device) & (load_o > 0)
    (index_c,) = true_indices(may_o[None], layout.copies_per_device)
    return jnp.where(index_c >= 0, order_e[jnp.maximum(index_c, 0)], EMPTY)
