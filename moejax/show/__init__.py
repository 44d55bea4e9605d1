"""How meshes, plans and loads look in a notebook or a terminal; needs no jax."""

from moejax.show.views import (
    View,
    device_loads,
    loads,
    mesh,
    plan,
    rows_per_device,
)

__all__ = ["View", "device_loads", "loads", "mesh", "plan", "rows_per_device"]
