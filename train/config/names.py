"""Names that a configuration may bind, and the kind of value that each one takes.

They are read off the dataclasses of moejax/config.py, so a new field needs no change
here.
"""

import dataclasses
import difflib
import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from moejax.config import Config
from train.messages import shorten

MAX_INT = 2**63 - 1
PARTS: dict[str, type] = typing.get_type_hints(Config)
"""Fields of Config and their classes: 'mesh' -> Topology. A gin file calls a part by
the field's name with a capital: 'Mesh'."""
CLASSES = {part.title(): cls for part, cls in PARTS.items()}
KINDS = {
    f"{name}.{field.name}": typing.get_type_hints(cls)[field.name]
    for name, cls in CLASSES.items()
    for field in dataclasses.fields(cls)
}
"""Every name that can be bound, and its annotation: 'Train.num_steps' -> int."""


def check_name(cls: str, field: str | None) -> str:
    """Return 'Class.field', or 'Class' where `field` is None.

    Raises ValueError with the nearest valid name. For a field of another class that is
    the name there: for Train.top_k, Moe.top_k.
    """
    if cls not in CLASSES:
        known = "valid are " + ", ".join(sorted(CLASSES))
        last_word = cls.rpartition(".")[2]
        near = nearest(last_word, {name: name for name in CLASSES}, known)
        raise ValueError(f"there is no class {shorten(cls, 80)}; {near}")
    name = cls if field is None else f"{cls}.{field}"
    if field is not None and name not in KINDS:
        own = {f.name: f"{cls}.{f.name}" for f in dataclasses.fields(CLASSES[cls])}
        everywhere = {other.split(".")[1]: other for other in KINDS}
        shown = everywhere if field in everywhere else own
        near = nearest(field, shown, "valid are " + ", ".join(own.values()))
        raise ValueError(f"{cls} has no field {shorten(field, 80)}; {near}")
    return name


def config_from_record(record: dict[str, dict[str, Any]]) -> Config:
    """Return the configuration that a checkpoint's record holds, {'moe': {'top_k': 2,
    ..}, ..}. Raises ValueError for a field, or a value, that this program does not
    have."""
    values: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    for part, fields in record.items():
        for field, value in fields.items():
            name = f"{part.title() if part in PARTS else part}.{field}"
            if name not in KINDS:
                raise ValueError(
                    f"the checkpoint's configuration has {name}, and this program does "
                    "not: use the version of moejax that wrote it"
                )
            try:
                values[part][field] = convert(value, KINDS[name])
            except TypeError as error:
                raise ValueError(
                    f"the checkpoint's configuration has {name} = {show(value)}, which "
                    f"{error}: use the version of moejax that wrote it"
                ) from error
    return Config(**{name: PARTS[name](**fields) for name, fields in values.items()})


def convert(value: Any, kind: Any) -> Any:
    """Convert `value` to the type annotation `kind`. Raises TypeError that says which
    type it must have.

    An int is accepted for a float, and a list for a tuple. A bool is not accepted for a
    number. An int has 64 bits at most. A float must be finite: inf and nan could not be
    written back as gin.
    """
    try:
        return _fit(value, kind)
    except TypeError as err:
        near = ""
        if typing.get_origin(kind) is Literal:
            choices = {str(choice): repr(choice) for choice in typing.get_args(kind)}
            near = nearest(show(value).strip("'"), choices, "")
        problem = f"must be {describe(kind)}, and is of type {type(value).__name__}"
        if _has_huge_int(value):
            problem = f"must be {describe(kind)}, and has more than 64 bits"
        raise TypeError(f"{problem}; {near}" if near else problem) from err


def _fit(value: Any, kind: Any) -> Any:
    """Return `value` as `kind` wants it, or raise TypeError without a message."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for choice in args:
            try:
                return _fit(value, choice)
            except TypeError:
                continue
    elif origin is Literal:
        for choice in args:
            if type(value) is type(choice) and value == choice:
                return choice
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(kinds) == len(value):
            return tuple(_fit(item, item_kind) for item, item_kind in zip(value, kinds))
    elif kind is float and type(value) in (int, float):
        if abs(value) <= sys.float_info.max:
            return float(value)
    elif type(value) is kind and (kind is not int or abs(value) <= MAX_INT):
        return value
    raise TypeError(kind)


def _has_huge_int(value: Any) -> bool:
    """Return whether a value is, or holds, an int that does not fit 64 bits."""
    if isinstance(value, list | tuple):
        return any(map(_has_huge_int, value))
    return type(value) is int and abs(value) > MAX_INT


def show(value: Any) -> str:
    """Return a value as a message shows it: as Python writes it, and cut to 80
    characters."""
    try:
        return shorten(repr(value), 80)
    except ValueError:  # Python writes no int of more than 4300 digits
        return "a number of more than 4300 digits"


def describe(kind: Any) -> str:
    """Return an annotation in words: 'an int or None', "one of 'auto', 'plain'"."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(choice) for choice in args)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in args)
    if origin is tuple:
        items = ["..." if item is Ellipsis else describe(item) for item in args]
        return f"a tuple of ({', '.join(items)})"
    words = {int: "an int", float: "a finite float", bool: "True or False"}
    return words.get(kind, "None" if kind is types.NoneType else f"a {kind.__name__}")


def nearest(name: str, shown: Mapping[str, str], otherwise: str) -> str:
    """Return 'nearest is X', where X is the value in `shown` whose key resembles `name`
    most; or `otherwise`, where no key does."""
    keys = {key.lower(): value for key, value in shown.items()}
    near = difflib.get_close_matches(name.lower(), keys, n=1)
    return f"nearest is {keys[near[0]]}" if near else otherwise


def names_in(message: str) -> list[str]:
    """Return the configuration fields that an error message mentions, as 'Class.field',
    each once.

    'Class.field' names one field. 'field=' names that of the class last mentioned, or
    else of every class that has such a field. 'dc x data x expert devices' and 'the
    tensor axis' name sizes of the mesh.
    """
    names: dict[str, None] = {}
    owner, text = "", _QUOTED.sub("", message)
    for cls, field, is_value in _FIELD.findall(text):
        owner = cls or owner
        if cls or (is_value and f"{owner}.{field}" in KINDS):
            names[f"{owner}.{field}"] = None
        elif is_value:
            names |= {name: None for name in KINDS if name.split(".")[1] == field}
    names |= {f"Mesh.{axis}": None for axis in _AXIS.findall(text)}
    return [name for name in names if name in KINDS]


_QUOTED = re.compile(r"(?<!\w)'[^']*'")
"""Pattern of a value in a message, such as 'data_expert'; not of an apostrophe."""
_FIELD = re.compile(r"(?:\b([A-Z]\w*)\.)?\b([a-z]\w*)\b(=?)")
"""Pattern of a field, such as Moe.top_k= or top_k=: class, field, equals sign."""
_AXIS = re.compile(r"\b(dc|data|expert|tensor)(?= x | axis| devices| \()")
"""Pattern of an axis of the mesh: 'data x', 'expert (4)', 'tensor axis'."""
