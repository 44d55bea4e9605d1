"""Fields of experts by name, wherever the configuration has them."""

import dataclasses

from moejax.config import Config, Dispatch, Moe


def parts_with(fields: dict, base: Config | None = None) -> dict[str, Moe | Dispatch]:
    """Return {'moe': .., 'dispatch': ..} with these fields, each in its own class.

    What `fields` does not name is as in `base`, or the default. TypeError for a field
    that neither class has.
    """
    base = base or Config()
    named = {field.name for field in dataclasses.fields(Moe)}
    moe = {name: value for name, value in fields.items() if name in named}
    rest = {name: value for name, value in fields.items() if name not in named}
    return {
        "moe": dataclasses.replace(base.moe, **moe),
        "dispatch": dataclasses.replace(base.dispatch, **rest),
    }
