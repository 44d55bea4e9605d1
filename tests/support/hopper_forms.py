"""Second forms of the grouped products' Hopper kernels, for setups of first forms."""

import dataclasses

from moejax.kernels.tuning import FUSED, Pass, Tiles
from tests.support.hopper_cases import Setup, fitting

FORMS = {
    "turns": {"halves": "turns"},
    "own": {"barriers": "own", "math": "approx"},
    "cluster": {"cluster": 2},
    "all": {"halves": "turns", "barriers": "own", "math": "approx", "cluster": 2},
}
"""Fields of Tiles by name of a form."""


def has_form(which: Pass, form: str) -> bool:
    """Return whether a pass has a form: wgrad has no barriers of its own."""
    return which != "wgrad" or form != "own"


def in_form(which: Pass, tiles: Tiles, form: str) -> Tiles:
    """Return the tiles in one of FORMS, without the choices that the pass does not
    have."""
    fields = dict(FORMS[form])
    if which == "wgrad":
        fields.pop("barriers", None)
    if which not in FUSED:
        fields.pop("math", None)
    return dataclasses.replace(tiles, **fields)


def setup_in_form(which: Pass, setup: Setup, form: str) -> Setup:
    """Return a setup for which the pass lowers, in one of FORMS."""
    setup = fitting(which, setup)
    return dataclasses.replace(setup, tiles=in_form(which, setup.tiles, form))
