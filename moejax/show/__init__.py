"""Views of meshes, plans and loads for notebooks and terminals; needs no jax.

Importing this package makes notebooks draw a Topology or an ExpertPlan as they draw a
View.
"""

from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from moejax.show.views import (
    View,
    device_loads,
    loads,
    mesh,
    plan,
    rows_per_device,
)

__all__ = ["View", "device_loads", "loads", "mesh", "plan", "rows_per_device"]


def _draw_in_notebooks() -> None:
    """Give Topology and ExpertPlan the `_repr_html_` that notebooks look for.

    It is set from here, so that `moejax.plan` need not know how its nouns look.
    """
    Topology._repr_html_ = lambda self: mesh(self)._repr_html_()
    ExpertPlan._repr_html_ = lambda self: plan(self)._repr_html_()


_draw_in_notebooks()
