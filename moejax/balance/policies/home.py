"""Plain expert parallelism: every expert at its owner, no copies."""

import numpy as np

from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout


def plan(
    load_lwe: np.ndarray, layout: Layout, cost: CostModel, current: ExpertPlan
) -> ExpertPlan:
    """The same whatever the load: what the other policies are measured against."""
    return ExpertPlan.home_in(layout, len(load_lwe))
