"""Policy of plain expert parallelism: every expert at its owner, without copies."""

import numpy as np

from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout


def plan(
    load_lwe: np.ndarray, layout: Layout, cost: CostModel, current: ExpertPlan
) -> ExpertPlan:
    """Return the plan with each expert at its owner, whatever the load: the baseline of
    the other policies."""
    return ExpertPlan.home_in(layout, len(load_lwe))
