"""Check that a run may continue from a checkpoint: same format, model and data."""

import dataclasses
import json
from typing import Any

from moejax.config import Config, Optimizer
from moejax.interop.fields import names_by_part
from train import data
from train.step.optimizer import learning_rate

FORMAT = 4
"""Checkpoint format that this program writes, and the only one that it reads.

Checkpoints of formats 1 to 3 have fields, state or layouts that this program no longer
has. Those of format 1 do not name their format."""

RATE_ERROR = 0.01
"""Relative change of the learning rate, at a resumed step, that is worth a line."""

FIXED_FIELDS = {
    **names_by_part(),
    "optimizer": {"name", "mu_dtype", "frozen"},
    "train": {"seed"},
}
"""Fields that decide which function the parameters define, and the dtypes of the state.

All other fields (mesh, buffers, remat, learning rate, number of steps) may differ
between a checkpoint and the run that resumes from it."""

SHARDING_FIELDS = {
    "mesh": {"dc", "data", "expert", "tensor"},
    "dispatch": {"group", "domain", "expert_shards", "schedule", "compression"},
}
"""Fields that decide how the state of compression is sharded and ordered."""


def has_same_sharding(saved: dict[str, Any], cfg: Config) -> bool:
    """Return whether a checkpoint orders the state of compression as this run does."""
    current = json.loads(json.dumps(cfg.to_dict()))
    return all(
        saved["config"].get(part, {}).get(field) == current[part][field]
        for part, fields in SHARDING_FIELDS.items()
        for field in fields
    )


def require_format(meta: dict[str, Any]) -> None:
    """Raise ValueError unless a checkpoint with this meta has the format FORMAT."""
    saved_format = meta.get("format", 1)
    if saved_format != FORMAT:
        raise ValueError(
            f"the checkpoint has format {saved_format}, but this program reads format "
            f"{FORMAT}: resume with the version of moejax that wrote it, choose "
            "another --run_dir, or start over with --fresh"
        )


def check(
    saved: dict[str, Any], cfg: Config, data_identity: dict[str, Any]
) -> list[str]:
    """Return the allowed changes of fields since the checkpoint, one line for each.

    A field that the checkpoint lacks is taken to have its default. Raises ValueError if
    the format, the model or the data differ.
    """
    require_format(saved)
    # The saved values have been through JSON, where a tuple becomes a list.
    current, default = (
        json.loads(json.dumps(config.to_dict())) for config in (cfg, Config())
    )
    changed, refused = [], []
    for part, fields in current.items():
        for field, value in fields.items():
            before = saved["config"].get(part, {}).get(field, default[part][field])
            if before != value and (part, field) != ("train", "run_dir"):
                line = f"{part}.{field}: {before!r} saved, {value!r} here"
                is_fixed = field in FIXED_FIELDS.get(part, ())
                # Switching compression on or off adds or removes state.
                is_fixed |= field == "compression" and None in (before, value)
                (refused if is_fixed else changed).append(line)
    if refused:
        raise ValueError(
            f"checkpoint of another model: {'; '.join(refused)}: restore the saved "
            "values, choose another --run_dir, or start over with --fresh"
        )
    data.check_identity(saved["data"], data_identity)
    return changed


def changed_rate(saved: dict[str, Any], cfg: Config, step: int) -> str:
    """Return a line where the learning rate of the first step after `step` is another
    one than the checkpoint's configuration had for it; '' where it is not."""
    named = {field.name for field in dataclasses.fields(Optimizer)}
    fields, train = saved["config"]["optimizer"], saved["config"]["train"]
    before = Optimizer(**{n: value for n, value in fields.items() if n in named})
    both = (before, train["num_steps"]), (cfg.optimizer, cfg.train.num_steps)
    old, new = (float(learning_rate(*args)(step)) for args in both)
    if abs(new - old) <= RATE_ERROR * old:
        return ""
    return (
        f"the learning rate is {new:.3g} from here; in the configuration of the "
        f"checkpoint it would be {old:.3g}"
    )
