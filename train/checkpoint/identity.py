"""What makes a checkpoint the checkpoint of this run, and what may change under it."""

import json
from typing import Any

from moejax.config import Config
from train import data

FIXED = {
    "model": {
        "vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim",
        "d_ff", "first_k_dense", "moe_every", "qk_norm", "tie_embeddings", "rope_theta",
        "norm_eps",
    },
    "moe": {"num_experts", "top_k", "d_expert", "num_shared_experts"},
    "router": {"kind", "normalise_gates", "gate_scale", "num_groups", "top_groups"},
    "train": {"seed"},
}  # fmt: skip
"""Fields that decide what function the parameters are; all others (mesh, buffers,
remat, learning rate, number of steps) may differ between a checkpoint and the run
that it goes on in."""


CUT = {
    "mesh": {"dc", "data", "expert", "tensor"},
    "moe": {"group", "domain", "expert_shards", "schedule", "compression"},
}
"""Fields that say in which order compression's state lies."""


def is_cut_alike(saved: dict[str, Any], cfg: Config) -> bool:
    """Whether compression's state lies in a checkpoint as it does in this run."""
    current = json.loads(json.dumps(cfg.to_dict()))
    return all(
        saved["config"].get(part, {}).get(field) == current[part][field]
        for part, fields in CUT.items()
        for field in fields
    )


def keeps_alike(saved: dict[str, Any], cfg: Config) -> bool:
    """Whether both compress gradients or neither does, and what is kept of them lies in
    a checkpoint as it does in this run."""
    ratio = saved["config"].get("moe", {}).get("gradient_compression")
    if ratio is None or cfg.moe.gradient_compression is None:
        return ratio is cfg.moe.gradient_compression
    return is_cut_alike(saved, cfg)


def check(
    saved: dict[str, Any], cfg: Config, data_identity: dict[str, Any]
) -> list[str]:
    """Fields that changed and may; ValueError for another model or other data."""
    # What is saved has been through JSON, where a tuple becomes a list.
    current = json.loads(json.dumps(cfg.to_dict()))
    changed, refused = [], []
    for part, fields in current.items():
        for field, value in fields.items():
            before = saved["config"].get(part, {}).get(field, value)
            if before != value and (part, field) != ("train", "run_dir"):
                line = f"{part}.{field}: {before!r} there, {value!r} here"
                is_fixed = field in FIXED.get(part, ())
                # Then there is a state of compression, or there is none.
                is_fixed |= field == "compression" and "none" in (before, value)
                (refused if is_fixed else changed).append(line)
    if refused:
        raise ValueError(
            f"checkpoint of another model: {'; '.join(refused)}: go on with the old "
            "values, choose another --run_dir, or start afresh with --fresh"
        )
    data.check_identity(saved["data"], data_identity)
    return changed
