"""Plain expert parallelism: every expert at its owner, no copies."""

import numpy as np

from moejax.balance.cost import CostModel
from moejax.layout import Layout
from moejax.plan import ExpertPlan


def plan(
    load_lwe: np.ndarray, layout: Layout, cost: CostModel, current: ExpertPlan
) -> ExpertPlan:
    """The same whatever the load: what the other policies are measured against."""
    return ExpertPlan.home_in(layout, len(load_lwe))
