"""Files of a published folder beside config.json and the tensors: the tokenizer, and
the configuration of generation with the ids of tokens that begin and end a text."""

import pathlib
from typing import Any, NamedTuple

from moejax.interop.architecture import CONFIG
from moejax.interop.folder import resolve
from moejax.interop.strict_json import read_json

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
COMPANIONS = (
    GENERATION, TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""Files that are copied with a model as they are."""


class TextIds(NamedTuple):
    """Ids of the tokens around a text."""

    start: int | None
    """Id of the token before a text: bos_token_id, or else the first of `ends`. None
    where the folder names neither."""
    ends: tuple[int, ...]
    """Ids that end a text that the model generates: eos_token_id, one or several."""

    @property
    def end(self) -> int | None:
        """First of `ends`, or None."""
        return next(iter(self.ends), None)

    def others(self, start: int, end: int) -> dict[str, int]:
        """Return the ids before and after a text, by their names in config.json, where
        this folder has others. Of several ends, each is right."""
        ids = {} if start == self.start else {"bos_token_id": start}
        return ids if end in self.ends else ids | {"eos_token_id": end}


def read_text_ids(folder: pathlib.Path) -> TextIds:
    """Return the ids of a folder: those of generation_config.json, or else of
    config.json. Raises ValueError, one line, where they are no ids, and for a link that
    leaves the folder."""
    record = {}
    for name in (CONFIG, GENERATION):
        if (folder / name).is_file():
            given = read_json(resolve(folder, name), name)
            inner = given.get("text_config")  # of a model that sees pictures too
            given = (inner if isinstance(inner, dict) else {}) | given
            keys = ("bos_token_id", "eos_token_id")
            record |= {key: given[key] for key in keys if given.get(key) is not None}
    ends = _ids(record.get("eos_token_id", []), "eos_token_id", folder)
    starts = _ids(record.get("bos_token_id", []), "bos_token_id", folder)
    return TextIds(next(iter(starts + ends), None), ends)


def read_companions(folder: pathlib.Path) -> dict[str, bytes]:
    """Return the contents of those of COMPANIONS that a folder has, by name. Raises
    ValueError for a link that leaves the folder."""
    present = (name for name in COMPANIONS if (folder / name).is_file())
    return {name: resolve(folder, name).read_bytes() for name in present}


def _ids(value: Any, name: str, folder: pathlib.Path) -> tuple[int, ...]:
    """Return an id, or a list of them, as a tuple."""
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ValueError(
            f"{folder}: {name} is {str(value)[:80]}, which is no id of a token: "
            f"correct it in {GENERATION} and {CONFIG}"
        )
    return tuple(ids)
