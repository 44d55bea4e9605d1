"""Fields that the published folder decides which Model.from_hf names."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Set
from typing import Any

from moejax.config import Config
from moejax.interop.architecture import CONFIG
from moejax.interop.companions import TOKENIZER, read_text_ids
from moejax.interop.fields import names_by_part
from moejax.interop.folder import resolve
from moejax.interop.published import read_architecture

FOLDER = "Model.from_hf"
KEPT = "hf"
"""Folder in a run directory with the config.json and the tokenizer of the published
model that the run started from."""


def folder_of(name: str) -> pathlib.Path:
    """Return the path that Model.from_hf, or an argument of a program, names.

    A relative one is relative to the working directory; ~ is the user's home.
    """
    return pathlib.Path(os.path.expanduser(name))


def fields_of_folder(name: str, bound: Set[str]) -> dict[str, Any]:
    """Return the values that a published folder gives to fields, 'Class.field': value.

    They are those that its config.json decides. Data.tokenizer, Data.separator and
    Data.end are among them, for its tokenizer.json, be it there or not, unless
    Data.tokenizer is in `bound`, the names that the user has bound. Nothing is read,
    and nothing returned, where the folder is missing and all fields of an architecture
    are bound, as in the config.gin of a run. Raises ValueError or OSError where
    config.json cannot be read, and for a link that leaves the folder.
    """
    folder = folder_of(name)
    if not (folder / CONFIG).exists():
        if _all_fields() <= bound:
            return {}
        fault = f"{folder} has no {CONFIG}"
        if not folder.is_dir():
            fault = f"there is no folder {folder}"
        raise ValueError(
            f"{fault}: give the folder of a published model, or, to continue a run "
            "whose folder is gone, the run's own config.gin"
        )
    fields = read_architecture(folder).fields
    values = {
        f"{part.title()}.{field}": value
        for part, of_part in fields.items()
        for field, value in of_part.items()
    }
    if "Data.tokenizer" not in bound:
        values["Data.tokenizer"] = str(resolve(folder, TOKENIZER))
        ids = read_text_ids(folder)
        for field, token in (("Data.separator", ids.start), ("Data.end", ids.end)):
            if token is not None and field not in bound:
                values[field] = token
    return values


def with_kept_tokenizer(
    cfg: Config, run_dir: pathlib.Path, recorded: str, say: Callable[[str], None]
) -> Config:
    """Return the configuration with the run's own copy of the tokenizer, and say so,
    where the file that Data.tokenizer names is gone.

    Only the file that the run has recorded, `recorded`, or that of the folder of
    Model.from_hf is replaced: another one that is missing is the user's mistake.
    """
    kept, data, name = run_dir / KEPT / TOKENIZER, cfg.data, cfg.model.from_hf
    known = {recorded} | (set() if name is None else {str(folder_of(name) / TOKENIZER)})
    is_here = os.path.exists(os.path.expanduser(data.tokenizer))
    if data.tokenizer == "bytes" or is_here or data.tokenizer not in known:
        return cfg
    if not kept.is_file():
        return cfg
    say(f"{data.tokenizer} is gone: the tokenizer is the run's own copy, {kept}")
    data = dataclasses.replace(data, tokenizer=str(kept))
    return dataclasses.replace(cfg, data=data)


def missing_tokenizer(cfg: Config) -> str | None:
    """Return the line about the folder of Model.from_hf whose tokenizer.json is to be
    used and is not there; None where all is well."""
    folder, name = folder_of(cfg.model.from_hf), cfg.data.tokenizer
    if name != str(folder / TOKENIZER) or os.path.exists(name):
        return None
    return (
        f"{folder} has no {TOKENIZER}: copy it there from where the model came from, "
        "or name one with --gin_param \"Data.tokenizer = '...'\""
    )


def notes_on_folder(name: str | None) -> tuple[str, ...]:
    """Return the lines about what a folder's config.json has and moejax does not read;
    none where there is no folder."""
    if name is None or not (folder_of(name) / CONFIG).exists():
        return ()
    return read_architecture(folder_of(name)).notes


def _all_fields() -> set[str]:
    """Return the names of all fields that config.json decides."""
    return {
        f"{part.title()}.{field}"
        for part, names in names_by_part().items()
        for field in names
    }
