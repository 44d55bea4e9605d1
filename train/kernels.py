"""Which kernels a run's layers use, in words for its start."""

from moejax.config import Config
from moejax.kernels.choice import Choice, grouped_dot_here, permute_here
from moejax.layout import Layout


def kernels_of(cfg: Config, layout: Layout) -> dict[str, Choice]:
    """By kernel, for round 0 of a layer of this layout on the device that is here."""
    if layout.kernels == "plain":
        why = "Moe.kernels='plain'"
        return {"grouped_dot": Choice("blocked", why), "permute": Choice("xla", why)}
    view, d = layout.exchanged, cfg.model.d_model
    num_rows = view.num_senders * view.rows_per_peer // view.num_windows
    shards = 1 if layout.is_local else cfg.expert_shards
    dtype = cfg.model.compute_dtype
    return {
        "grouped_dot": grouped_dot_here(dtype, num_rows, d, cfg.moe.d_expert // shards),
        "permute": permute_here(dtype, d),
    }


def kernel_line(cfg: Config, layout: Layout) -> str:
    said = kernels_of(cfg, layout).items()
    parts = [f"{name} {choice.implementation} ({choice.why})" for name, choice in said]
    return f"kernels            {', '.join(parts)}"
