"""Views of meshes, plans and loads for notebooks and terminals, without jax.

A notebook that imports this package draws a Topology or an ExpertPlan as a View.
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

    It is set here, so that `moejax.plan` does not depend on this package.
    """
    Topology._repr_html_ = lambda self: mesh(self)._repr_html_()
    ExpertPlan._repr_html_ = lambda self: plan(self)._repr_html_()


_draw_in_notebooks()
