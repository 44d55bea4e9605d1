"""Whether a checkpoint is of this run, and what a run may change under it."""

import json
from typing import Any

from moejax.config import Config
from train import data

FORMAT = 3
"""The format of checkpoints that this program writes, and the only one that it reads.
1: fields of Dispatch were fields of Moe, and no checkpoint said its format."""

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
    "dispatch": {"group", "domain", "expert_shards", "schedule", "compression"},
}
"""Fields that say in which order compression's state lies."""


def is_cut_alike(saved: dict[str, Any], cfg: Config) -> bool:
    """Return whether compression's state lies in a checkpoint as in this run."""
    current = json.loads(json.dumps(cfg.to_dict()))
    return all(
        saved["config"].get(part, {}).get(field) == current[part][field]
        for part, fields in CUT.items()
        for field in fields
    )


def keeps_alike(saved: dict[str, Any], cfg: Config) -> bool:
    """Return whether both compress gradients or neither does, and what is kept of them
    lies in a checkpoint as it does in this run."""
    ratio = saved["config"]["dispatch"]["gradient_compression"]
    if ratio is None or cfg.dispatch.gradient_compression is None:
        return ratio is cfg.dispatch.gradient_compression
    return is_cut_alike(saved, cfg)


def require_format(meta: dict[str, Any]) -> None:
    """Raise ValueError unless a checkpoint with this meta is of FORMAT."""
    found = meta.get("format", 1)
    if found != FORMAT:
        raise ValueError(
            f"the checkpoint has format {found}, and this program reads format "
            f"{FORMAT}: go on with the version of moejax that wrote it, choose another "
            "--run_dir, or start afresh with --fresh"
        )


def check(
    saved: dict[str, Any], cfg: Config, data_identity: dict[str, Any]
) -> list[str]:
    """Return the fields that changed and may; raise ValueError for another format,
    model or data. A field that the checkpoint lacks had its default."""
    require_format(saved)
    # What is saved has been through JSON, where a tuple becomes a list.
    current, default = (
        json.loads(json.dumps(config.to_dict())) for config in (cfg, Config())
    )
    changed, refused = [], []
    for part, fields in current.items():
        for field, value in fields.items():
            before = saved["config"].get(part, {}).get(field, default[part][field])
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
