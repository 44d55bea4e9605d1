"""Views of meshes, plans, layouts, loads, decisions and costs for notebooks and
terminals, without jax.

Each function returns a View. A notebook that evaluates one of the objects shows its
view without a call (`moejax/rich.py`).
"""

from moejax.show.costs import choice, cost_model, prediction, step_parts
from moejax.show.decisions import decision
from moejax.show.layouts import layout
from moejax.show.traffic import pairs, stats
from moejax.show.views import (
    View,
    device_loads,
    loads,
    mesh,
    plan,
    rows_per_device,
)

__all__ = [
    "View",
    "choice",
    "cost_model",
    "decision",
    "device_loads",
    "layout",
    "loads",
    "mesh",
    "pairs",
    "plan",
    "prediction",
    "rows_per_device",
    "stats",
    "step_parts",
]
