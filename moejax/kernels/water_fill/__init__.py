"""Water-filling: items poured over bins until the fullest is as low as a proof says.

    portable.py  plain XLA operations, on any device
    hopper.py    the same sweeps as one Pallas kernel (Mosaic GPU), for Hopper

The definition is moejax.plan.water_filling.swept.
"""

from jaxtyping import Array, Int

from moejax.kernels.water_fill.portable import Filled
from moejax.kernels.water_fill.portable import water_fill as portable_water_fill

__all__ = ["Filled", "fits_fused", "water_fill"]


def fits_fused(num_colors: int, num_bins: int) -> bool:
    """Whether the fused kernel has room for so many cells."""
    from moejax.kernels.water_fill import hopper

    return hopper.fits(num_colors, num_bins)


def water_fill(
    item_cw: Int[Array, "c w"],
    amount_cw: Int[Array, "c w"],
    fixed_w: Int[Array, " w"],
    colors: Int[Array, ""],
    tolerance: Int[Array, ""],
    *,
    max_sweeps: int,
    fused: bool = False,
    interpret: bool = False,
) -> Filled:
    """What each cell holds after sweeps of water-filling, each bin's level, a lower
    bound of the fullest bin, and how many sweeps it took. All int32; the same bits on
    every device and with `fused` or without.

    A cell is a color c of a bin w. `item_cw` says which item may lie there, -1 for
    none: all cells of an item have one color, and a bin has one item of a color, so
    that items of a color do not touch each other. `amount_cw` is where the items lie
    at first, 0 where there is no item; an item's sum never changes. `fixed_w` lies in
    the bins and cannot move. Nothing is negative, and a bin's level is what is fixed
    and its cells. Only the first `colors` rows are used.

    A sweep visits the colors in order. Each pours its items anew over their bins, on
    top of what else is there (`ground`): up to the surface, min over k of
    floor((amount + sum of the k lowest grounds) / k), and what is left over one each to
    bins with ground <= surface, lowest number first.

    The bound is a certificate, computed before the first sweep and after each: max over
    k of ceil(what can lie nowhere but in the k fullest bins / k); of bins as full as
    each other the lower number counts as fuller. Sweeps end when the fullest bin is no
    higher than bound + `tolerance`, when a sweep changed nothing, or after
    `max_sweeps`.

        bin             0    1    2
        item, c = 0     0    0    -       amount 3 3 0     poured 4 2 0
        item, c = 1     -    1    1              0 2 2            0 1 3
        level                                    3 5 2            4 3 3

    `fused` solves in one kernel for Hopper GPUs, at most 128 bins; `interpret` runs
    that kernel on any device, slowly, for tests. Raises NotImplementedError for a table
    of cells that does not fit into shared memory. Source: MicroMoE (arXiv 2511.16947)
    for the problem; the sweeps minimise the sum of squared levels, item by item.
    """
    arrays = item_cw, amount_cw, fixed_w, colors, tolerance
    if not fused:
        return portable_water_fill(*arrays, max_sweeps)
    # Pallas takes half a second to import, and only this needs it.
    from moejax.kernels.water_fill import hopper

    return hopper.water_fill(*arrays, max_sweeps, interpret=interpret)
