"""Shadowing in NumPy: experts copied to all devices for one micro-batch, by its loads.

FasterMoE (PPoPP'22, Eq. 7-8, Alg. 1) with current counts, as published: experts are
taken from the most rows down, and a shadow pays while the time by Eq. 8 falls.

    device             0         1         4 experts, 2 on each device; expert 0 is hot
    own experts      0   1     2   3
    slots            0 1 -     2 3 0       device 1 keeps its own rows of expert 0

Times are counted in rows of compute, in int32, so that all devices agree bit for bit:
Eq. 7 is max B + toll, Eq. 8 max B' + r price. This is the definition.
moejax.moe.split.shadow runs on devices and must choose the same experts.
"""

import numpy as np

from moejax.plan.layout import Layout

PATIENCE = 2
"""Number of shadows in a row that do not pay after which the search stops, as in
moejax.balance.policies.fastermoe."""
TOLL_BITS = 8
"""Fractional bits of Layout.exchange_toll."""
MAX_PRICE = 2**22
"""Largest price of a shadow, in rows, which keeps sums of a few within int32."""
MAX_TOLL = 2**14
"""Largest toll of a row, in 1/256 rows: 64 rows. The toll of up to 2^24 rows is within
int32."""


def choose(load_we: np.ndarray, owned_e: np.ndarray, layout: Layout) -> list[int]:
    """Return the experts to shadow in one layer and micro-batch, the hottest first.

    `load_we` are whole rows by source device and expert, `owned_e` the expert at each
    position of the owners. A device's copies, and an owner's offers, are limited by the
    budgets of the layout: an expert whose owner offers as many already is passed over.
    """
    w, own = layout.num_devices, layout.experts_per_device
    owner_e = np.argsort(owned_e) // own
    load_e = load_we.sum(axis=0)
    rows_w = np.bincount(owner_e, load_e, w).astype(np.int64)
    least, shadows, best = rows_w.max() + toll(rows_w.max(), layout), [], 0
    num_offers = np.zeros(w, int)
    for expert in np.argsort(-load_e, kind="stable"):
        is_full = len(shadows) == min(layout.copies_per_device, best + PATIENCE)
        if is_full or load_e[expert] == 0:
            break
        owner = owner_e[expert]
        if num_offers[owner] == layout.offers_per_device:
            continue
        num_offers[owner] += 1
        shadows.append(int(expert))
        rows_w += load_we[:, expert]
        rows_w[owner] -= load_e[expert]
        cost = rows_w.max() + len(shadows) * layout.shadow_price
        if cost < least:
            least, best = cost, len(shadows)
    return shadows[:best]


def toll(rows, layout: Layout):
    """Return the exchange of rows in Eq. 7 as rows of compute, rounded down in two
    parts, for whole `rows` of NumPy or JAX."""
    mask = (1 << TOLL_BITS) - 1
    per_row = layout.exchange_toll
    return (rows >> TOLL_BITS) * per_row + ((rows & mask) * per_row >> TOLL_BITS)
