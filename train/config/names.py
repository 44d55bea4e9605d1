"""Every name that a configuration may bind, what kind of value it takes, and in words.

Read off the dataclasses of moejax/config.py, so that a new field needs nothing here.
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

PARTS: dict[str, type] = typing.get_type_hints(Config)
"""'mesh' -> Topology: the fields of Config. gin files call each by its name in Config,
    'Mesh'."""
CLASSES = {part.title(): cls for part, cls in PARTS.items()}
KINDS = {
    f"{name}.{field.name}": typing.get_type_hints(cls)[field.name]
    for name, cls in CLASSES.items()
    for field in dataclasses.fields(cls)
}
"""'Train.num_steps' -> int: every name that can be bound, and its annotation."""


def check_name(cls: str, field: str | None) -> str:
    """'Class.field', or 'Class' without a field; ValueError has the nearest valid name.

    A field that another class has is taken for its own: Train.top_k -> Moe.top_k.
    """
    if cls not in CLASSES:
        known = "valid are " + ", ".join(sorted(CLASSES))
        last_word = cls.rpartition(".")[2]
        near = nearest(last_word, {name: name for name in CLASSES}, known)
        raise ValueError(f"there is no class {cls}; {near}")
    name = cls if field is None else f"{cls}.{field}"
    if field is not None and name not in KINDS:
        own = {f.name: f"{cls}.{f.name}" for f in dataclasses.fields(CLASSES[cls])}
        everywhere = {other.split(".")[1]: other for other in KINDS}
        shown = everywhere if field in everywhere else own
        near = nearest(field, shown, "valid are " + ", ".join(own.values()))
        raise ValueError(f"{cls} has no field {field}; {near}")
    return name


def config_from_record(record: dict[str, dict[str, Any]]) -> Config:
    """Return the configuration that a record names, {'moe': {'top_k': 2, ..}, ..}.
    Raises ValueError for a field that this program does not have."""
    values: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
    for part, fields in record.items():
        for field, value in fields.items():
            name = f"{part.title() if part in PARTS else part}.{field}"
            if name not in KINDS:
                raise ValueError(
                    f"the checkpoint's configuration has {name}, and this program does "
                    "not: use the version of moejax that wrote it"
                )
            values[part][field] = convert(value, KINDS[name])
    return Config(**{name: PARTS[name](**fields) for name, fields in values.items()})


def convert(value: Any, kind: Any) -> Any:
    """`value` as the annotation `kind` wants it; TypeError says what it must be.

    An int is also a float, a list also a tuple; a bool is no number, and a float is
    finite: inf and nan could not be written back as gin.
    """
    try:
        return _fit(value, kind)
    except TypeError as err:
        near = ""
        if typing.get_origin(kind) is Literal:
            shown = {str(choice): repr(choice) for choice in typing.get_args(kind)}
            near = nearest(str(value), shown, "")
        problem = f"must be {describe(kind)}, and is of type {type(value).__name__}"
        raise TypeError(f"{problem}; {near}" if near else problem) from err


def _fit(value: Any, kind: Any) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        for arm in args:
            try:
                return _fit(value, arm)
            except TypeError:
                continue
    elif origin is Literal:
        for choice in args:
            if type(value) is type(choice) and value == choice:
                return choice
    elif origin is tuple and isinstance(value, list | tuple):
        arms = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(arms) == len(value):
            return tuple(_fit(item, arm) for item, arm in zip(value, arms))
    elif kind is float and type(value) in (int, float):
        if abs(value) <= sys.float_info.max:
            return float(value)
    elif type(value) is kind:
        return value
    raise TypeError(kind)


def describe(kind: Any) -> str:
    """An annotation in words: 'an int or None', "one of 'xla', 'cudnn'"."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(describe(arm) for arm in args)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in args)
    if origin is tuple:
        arms = ["..." if arm is Ellipsis else describe(arm) for arm in args]
        return f"a tuple of ({', '.join(arms)})"
    words = {int: "an int", float: "a finite float", bool: "True or False"}
    return words.get(kind, "None" if kind is types.NoneType else f"a {kind.__name__}")


def nearest(name: str, shown: Mapping[str, str], otherwise: str) -> str:
    """'nearest is X' with X from the values of `shown`, whose keys are compared."""
    keys = {key.lower(): value for key, value in shown.items()}
    near = difflib.get_close_matches(name.lower(), keys, n=1)
    return f"nearest is {keys[near[0]]}" if near else otherwise


def blame(message: str, where_of: Mapping[str, str]) -> str:
    """Where the first bound field that a rule's message names was bound.

    'Class.field' and 'field=' are names for certain and come first; any other word may
    be one ('dc x data x expert devices').
    """
    owner = ""
    words = re.findall(r"(?:\b([A-Z]\w*)\.)?\b([a-z]\w*)(=?)", message)
    for cls, field, _ in sorted(words, key=lambda word: not (word[0] or word[2])):
        owner = cls or owner
        names = [f"{owner}.{field}"]
        if not cls:
            names += [f"{other}.{field}" for other in CLASSES]
        for name in names:
            if name in where_of:
                return where_of[name]
    return "configuration"
