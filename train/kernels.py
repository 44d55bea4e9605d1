"""Which kernels a run's layers use, in words for its start."""

from moejax.config import Config
from moejax.kernels import choice
from moejax.kernels.choice import Choice
from moejax.kernels.shapes import Shape
from moejax.kernels.tuning import of_layer, tuned
from moejax.layout import Layout


def kernels_of(cfg: Config, layout: Layout) -> dict[str, Choice]:
    """By kernel, for a layer of this layout on the device that is here; of later rounds
    where these get another one."""
    if layout.kernels == "plain":
        why = "Moe.kernels='plain'"
        return {"grouped_dot": Choice("blocked", why), "permute": Choice("xla", why)}
    view, d = layout.exchanged, cfg.model.d_model
    dtype = cfg.model.compute_dtype
    first, later = (
        _grouped_dot(cfg, layout, view.num_senders * rows // view.num_windows)
        for rows in (view.rows_per_peer, view.rows_per_round)
    )
    kernels = {"grouped_dot": first, "permute": choice.permute_here(dtype, d)}
    if layout.exchange == "exact" and later.implementation != first.implementation:
        kernels["grouped_dot in later rounds"] = later
    return kernels


def _grouped_dot(cfg: Config, layout: Layout, num_rows: int) -> Choice:
    shards = 1 if layout.is_local else cfg.expert_shards
    d, f, dtype = cfg.model.d_model, cfg.moe.d_expert // shards, cfg.model.compute_dtype
    found = choice.grouped_dot_here(dtype, num_rows, d, f)
    if found.implementation != "hopper":
        return found
    shape = Shape(num_rows, d, f, layout.slots_per_device)
    kind = choice.device_here().device_kind
    products = of_layer(shape)
    count = sum(tuned(which, of, dtype, kind) is not None for which, of in products)
    said = f"{count} of {len(products)} products with measured tiles"
    return Choice("hopper", f"{found.why}, {said}")


def kernel_line(kernels: dict[str, Choice]) -> str:
    said = kernels.items()
    parts = [f"{name} {found.implementation} ({found.why})" for name, found in said]
    return f"kernels            {', '.join(parts)}"
