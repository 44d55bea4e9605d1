"""Set fields of Moe and Dispatch by name, without saying which class has them."""

import dataclasses

from moejax.config import Config, Dispatch, Moe


def parts_with(fields: dict, base: Config | None = None) -> dict[str, Moe | Dispatch]:
    """Return {'moe': .., 'dispatch': ..} with each of `fields` in the class that has
    it.

    Other fields have the values of `base`, or the defaults. Raises TypeError for a
    field that neither class has.
    """
    base = base or Config()
    named = {field.name for field in dataclasses.fields(Moe)}
    moe = {name: value for name, value in fields.items() if name in named}
    rest = {name: value for name, value in fields.items() if name not in named}
    return {
        "moe": dataclasses.replace(base.moe, **moe),
        "dispatch": dataclasses.replace(base.dispatch, **rest),
    }
