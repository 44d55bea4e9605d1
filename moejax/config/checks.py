"""Rules that fields of a configuration keep, and their limits."""

import dataclasses
import difflib
import typing
from typing import Any, Literal


def require(claim: bool, message: str) -> None:
    """Raise ValueError with `message` unless `claim` holds."""
    if not claim:
        raise ValueError(message)


def require_min(instance: Any, minimum: float, *names: str) -> None:
    """Raise ValueError if one of these fields of `instance` is below `minimum`.

    A field that is None passes.
    """
    for name in names:
        value = getattr(instance, name)
        # gin binds the base class: an error in a subclass names the base too.
        part = type(instance).__mro__[-2].__name__
        rule = f"{part}.{name}={value} must be at least {minimum}"
        require(value is None or value >= minimum, rule)


def require_max(instance: Any, maximum: int, reason: str, *names: str) -> None:
    """Raise ValueError with the reason if one of these fields of `instance` is above
    `maximum`.

    A field that is None passes.
    """
    for name in names:
        value = getattr(instance, name)
        part = type(instance).__mro__[-2].__name__
        rule = f"{part}.{name}={value} must be at most {maximum}: {reason}"
        require(value is None or value <= maximum, rule)


def require_positive(instance: Any, *names: str) -> None:
    """Raise ValueError unless these fields of `instance` are above 0.

    A field that is None passes.
    """
    for name in names:
        value = getattr(instance, name)
        rule = f"{type(instance).__name__}.{name}={value} must be above 0"
        require(value is None or value > 0, rule)


def require_choices(instance: Any) -> None:
    """Raise ValueError if a field of `instance` is a string that its type, a Literal,
    does not name."""
    for field in dataclasses.fields(instance):
        value, kinds = getattr(instance, field.name), typing.get_args(field.type)
        choices = [
            choice
            for kind in (field.type, *kinds)
            if typing.get_origin(kind) is Literal
            for choice in typing.get_args(kind)
        ]
        if not isinstance(value, str) or not choices or str in kinds:
            continue
        if value in choices:  # the nearest of them is slow to find
            continue
        names = [choice for choice in choices if isinstance(choice, str)]
        near = difflib.get_close_matches(value, names, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        part = type(instance).__mro__[-2].__name__
        rule = f"{part}.{field.name}={value!r} must be one of {', '.join(names)}{hint}"
        raise ValueError(rule)


MAX_INT32 = 2**31 - 1
MAX_WAIT_SEC = 10**7
MAX_WIDTH = 2**20
MAX_HEADS = 2**14
MAX_LAYERS = 2**12
MAX_SEED = 2**63 - 1
MAX_TABLE = 2**22
"""Largest number of entries of a table with one for each layer and expert, or for each
layer and slot. Processes send such tables to one another, and every device holds them.
"""
AXIS = "axes of arrays, and products of two, have fewer than 2**31 entries"
"""Reason for the largest widths."""
STEPS = "steps are counted in int32"
