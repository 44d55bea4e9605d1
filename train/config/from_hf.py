"""Fields that the published folder decides which Model.from_hf names."""

import dataclasses
import os
import pathlib
from collections.abc import Set
from typing import Any

from moejax.config import Config
from moejax.interop.architecture import CONFIG
from moejax.interop.companions import TOKENIZER, read_text_ids
from moejax.interop.published import read_architecture
from train.config.names import PARTS

FOLDER = "Model.from_hf"
KEPT = "hf"
"""Folder in a run directory with the config.json and the tokenizer of the published
model that the run started from."""
PUBLISHED_PARTS = ("model", "attention", "rope", "mla", "moe", "router")
"""Parts of a configuration of which config.json decides fields."""


def folder_of(name: str) -> pathlib.Path:
    """Return the path that Model.from_hf names. A relative one is relative to the
    working directory."""
    return pathlib.Path(os.path.expanduser(name))


def fields_of_folder(name: str, bound: Set[str]) -> dict[str, Any]:
    """Return the values that a published folder gives to fields, 'Class.field': value.

    They are those that its config.json decides. Data.tokenizer and Data.separator are
    among them, for its tokenizer.json, unless Data.tokenizer is in `bound`, the names
    that the user has bound. Nothing is read, and nothing returned, where the folder is
    missing and all fields of PUBLISHED_PARTS are bound, as in the config.gin of a run.
    Raises ValueError or OSError where config.json cannot be read.
    """
    folder = folder_of(name)
    if not (folder / CONFIG).exists():
        if _all_fields() <= bound:
            return {}
        raise ValueError(
            f"{folder} has no {CONFIG}: give the folder of a published model, or, to "
            "continue a run whose folder is gone, the run's own config.gin"
        )
    fields = read_architecture(folder).fields
    values = {
        f"{part.title()}.{field}": value
        for part, of_part in fields.items()
        for field, value in of_part.items()
    }
    if "Data.tokenizer" not in bound and (folder / TOKENIZER).is_file():
        values["Data.tokenizer"] = str(folder / TOKENIZER)
        start = read_text_ids(folder).start
        if start is not None and "Data.separator" not in bound:
            values["Data.separator"] = start
    return values


def with_kept_tokenizer(cfg: Config, run_dir: pathlib.Path) -> Config:
    """Return the configuration with the run's own copy of the tokenizer, where the file
    that Data.tokenizer names is gone."""
    kept, data = run_dir / KEPT / TOKENIZER, cfg.data
    if data.tokenizer == "bytes" or os.path.exists(os.path.expanduser(data.tokenizer)):
        return cfg
    if not kept.is_file():
        return cfg
    data = dataclasses.replace(data, tokenizer=str(kept))
    return dataclasses.replace(cfg, data=data)


def notes_on_folder(name: str | None) -> tuple[str, ...]:
    """Return the lines about what a folder's config.json has and moejax does not read;
    none where there is no folder."""
    if name is None or not (folder_of(name) / CONFIG).exists():
        return ()
    return read_architecture(folder_of(name)).notes


def _all_fields() -> set[str]:
    """Return the names of all fields that config.json may decide."""
    return {
        f"{part.title()}.{field.name}"
        for part in PUBLISHED_PARTS
        for field in dataclasses.fields(PARTS[part])
    }
