"""Water-filling: spread items over bins so that the fullest bin is as low as possible.

    portable.py  plain XLA operations, on any device
    hopper.py    the same sweeps as one Pallas kernel (Mosaic GPU), for Hopper

In the MoE layer, items are experts with rows, and bins are devices. The definition is
moejax.plan.water_filling.sweep.
"""

from jaxtyping import Array, Int

from moejax.choice import Choice
from moejax.kernels.device import hopper_or, why_not_hopper
from moejax.kernels.water_fill.portable import Filled
from moejax.kernels.water_fill.portable import water_fill as portable_water_fill

__all__ = ["Filled", "choose_water_fill", "water_fill"]


def choose_water_fill(num_colors: int, num_bins: int) -> Choice[str]:
    """Return the implementation for a table of these sizes on the current device:
    'hopper' or 'portable', a loop at which the host of a GPU waits."""
    if why := why_not_hopper():
        return Choice("portable", why)
    # Importing Pallas takes half a second, and only Hopper GPUs need it.
    from moejax.kernels.water_fill import hopper

    declined = None
    if not hopper.fits(num_colors, num_bins):
        declined = f"no room for {num_colors} colors on {num_bins} devices"
    return hopper_or("portable", declined)


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
    """Return the amounts after sweeps of water-filling, with a bound that proves how
    good they are.

    All values are int32 and not negative, and the result has the same bits on every
    device, with `fused` or without it. A *cell* is a color c of a bin w. Only the first
    `colors` rows of cells are used.

    item_cw     item that a cell may hold, -1 for none. All cells of an item have the
                same color, and a bin has at most one item of each color, so that items
                of one color share no bin.
    amount_cw   units of the item in each cell at the start, 0 where there is no item.
                The sum over the cells of an item never changes.
    fixed_w     units in each bin that cannot move

    The level of a bin is the sum of its fixed units and of its cells.

    A sweep visits the colors in order. For each item of a color, let `ground` be the
    levels of its bins without this item. The item is poured on top, up to the surface
    min over k of floor((amount + sum of the k lowest grounds) / k). The units that are
    left over go one each to bins with ground <= surface, the lowest bin number first.

    The bound is a certificate, computed before the first sweep and after each one: the
    maximum over k of ceil(r / k), where r is the number of units that can be nowhere
    but in the k fullest bins. If bins are equally full, the lower number counts as
    fuller. Sweeps end when the level of the fullest bin is at most bound + `tolerance`,
    when a sweep changed nothing, or after `max_sweeps`.

        bin             0    1    2
        item, c = 0     0    0    -       amount 3 3 0     poured 4 2 0
        item, c = 1     -    1    1              0 2 2            0 1 3
        level                                    3 5 2            4 3 3

    `fused` runs all sweeps as one kernel on a Hopper GPU, for at most 128 bins.
    `interpret` runs that kernel on any device, slowly, for tests. Raises
    NotImplementedError for a table of cells that does not fit into shared memory.

    Source: MicroMoE (arXiv 2511.16947) for the problem. The sweeps minimise the sum of
    squared levels, item by item.
    """
    arrays = item_cw, amount_cw, fixed_w, colors, tolerance
    if not fused:
        return portable_water_fill(*arrays, max_sweeps)
    # Importing Pallas takes half a second, and only this path needs it.
    from moejax.kernels.water_fill import hopper

    return hopper.water_fill(*arrays, max_sweeps, interpret=interpret)
