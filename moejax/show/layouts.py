"""The view of a layout: its figures, and the fields that differ from their defaults."""

import dataclasses

from moejax.plan.layout import Layout
from moejax.show.table import View

DERIVED = {
    "slots of all devices": "num_slots",
    "experts that a device owns": "experts_per_device",
    "rows of a later round": "rows_per_round",
    "devices of a domain": "domain_size",
}
"""Figures that follow from the fields, by the property that computes them."""


def layout(layout: Layout) -> View:
    """Return a view of a layout: fields that are set, and what follows from them.

    A note lists the fields that have their defaults.
    """
    rows, usual = [("field", "value")], []
    for field in dataclasses.fields(layout):
        value = getattr(layout, field.name)
        if field.default is not dataclasses.MISSING and value == field.default:
            usual.append(f"{field.name} {_text(value)}")
        else:
            rows.append((field.name, _text(value)))
    for words, name in DERIVED.items():
        rows.append((words, _text(getattr(layout, name))))
    title = (
        f"layout: {layout.num_experts} experts on {layout.num_devices} devices, "
        f"{layout.slots_per_device} slots each, store {layout.store}"
    )
    return View(title, tuple(rows), (f"defaults: {', '.join(usual)}",))


def _text(value) -> str:
    """Return the value of a field in words."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    if dataclasses.is_dataclass(value):
        names = (field.name for field in dataclasses.fields(value))
        return "; ".join(f"{name} {_text(getattr(value, name))}" for name in names)
    return str(value)
