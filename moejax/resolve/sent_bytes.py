"""Bytes that a device sends in the MoE layers of one training step, by collective.

Rows, weights and gradients of experts count, as the cost model and the choices of
schedule and domain count them. Not in it are later rounds of an exchange, which depend
on the loads, and the parameters and gradients of all other layers.
"""

from collections import Counter

from moejax.config import Config
from moejax.perf import choose_domain, choose_schedule
from moejax.perf.calibration import leaving_bytes
from moejax.perf.cost_model import CostModel
from moejax.plan.layout import Layout
from moejax.resolve.communication import layer_traffic, micro_batch_shape
from moejax.resolve.partition import micro_batch_tokens
from moejax.resolve.speeds import presumed

AXES = ("dc", "data", "expert", "tensor")


def sent_bytes(cfg: Config, cost: CostModel, layout: Layout) -> dict[str, float]:
    """Return the bytes that leave a device in one step, by the name of the collective,
    such as "all_to_all expert rows"; empty where nothing travels, and for dense
    training, which no cost model describes."""
    if cfg.router.training == "dense":
        return {}
    sizes = {axis: getattr(cfg.mesh, axis) for axis in layout.axes}
    if layout.tensor is not None:
        layer = _predicted(cfg, layout)
    elif layout.domain is not None:
        layer = _predicted(cfg, layout) + _gathered(cfg, cost, layout)
    else:
        rows = _rows(cfg, cost, layout, sizes)
        layer = rows + _copies(cost, layout, sizes) + _gathered(cfg, cost, layout)
    num_layers = cfg.model.num_moe_layers
    return {name: num_layers * size for name, size in layer.items() if size}


def _predicted(cfg: Config, layout: Layout) -> Counter:
    """Return the bytes of one layer in one step from the prediction of its schedule or
    domain. Bytes depend on no speed, so that presumed ones do."""
    calibration = presumed({axis: getattr(cfg.mesh, axis) for axis in AXES}, "")
    if layout.tensor is not None:
        schedule, shape = layout.tensor.schedule, micro_batch_shape(cfg)
        prediction = choose_schedule.predict(shape, calibration, schedule)
    else:
        shared, traffic = layout.domain.shared, layer_traffic(cfg, calibration)
        prediction = choose_domain.predict(traffic, shared, calibration)
    total = Counter()
    for term in prediction.terms:
        total[term.name] += cfg.train.accumulate_steps * term.bytes
    return total


def _rows(
    cfg: Config, cost: CostModel, layout: Layout, sizes: dict[str, int]
) -> Counter:
    """Return the bytes of one layer's rows in round 0: whole buffers, or with ragged
    transport the rows of an even load."""
    w = layout.num_devices
    count = cost.num_exchanged * cost.micro_batches * layout.num_exchanges
    rows = w * layout.rows_per_peer
    if layout.transport == "ragged":
        rows = micro_batch_tokens(cfg) * cfg.moe.top_k / layout.num_exchanges
    groups = {"_".join(axis for axis in sizes if sizes[axis] > 1): w}
    if layout.transport == "hierarchical":
        groups = sizes
    return Counter(
        {
            f"all_to_all {name} rows": count
            * leaving_bytes("all_to_all", rows * cost.bytes_per_row, size)
            for name, size in groups.items()
        }
    )


def _copies(cost: CostModel, layout: Layout, sizes: dict[str, int]) -> Counter:
    """Return the bytes of one layer's weights on their way to other devices of the
    group, and of their gradients on the way back."""
    experts = layout.offers_per_device + layout.copies_per_device
    if layout.store == "sharded":
        experts = layout.slots_per_device
    size = leaving_bytes(
        "all_to_all", experts * cost.bytes_per_expert, layout.num_devices
    )
    if layout.makes_replicas:  # each exchange chooses its own copies
        size *= layout.num_exchanges
    num_fetched = 1
    if layout.store != "resident":
        size, num_fetched = cost.micro_batches * size, cost.num_fetched
    name = "all_to_all " + "_".join(axis for axis in sizes if sizes[axis] > 1)
    return Counter({f"{name} weights": num_fetched * size, f"{name} gradients": size})


def _gathered(cfg: Config, cost: CostModel, layout: Layout) -> Counter:
    """Return the bytes of one layer's slots that are gathered over data, and of their
    gradients."""
    if "data" in layout.axes:
        return Counter()
    num_gathered, num_scattered = cost.num_gathers(layout)
    size = leaving_bytes("all_gather", cost.bytes_per_expert, cfg.mesh.data)
    return Counter(
        {
            "all_gather data weights": num_gathered * size,
            "reduce_scatter data gradients": num_scattered * size,
        }
    )
