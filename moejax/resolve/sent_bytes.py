"""Bytes that a device sends in the MoE layers of one training step, by collective.

Rows, weights and gradients of experts count, as the cost model prices them. Not in it
are later rounds of an exchange, which depend on the loads, and the parameters and
gradients of all other layers.
"""

from collections import Counter

from moejax.config import Config
from moejax.perf.cost_model import CostModel
from moejax.perf.traffic import layer_rows, pair_rows
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.resolve.communication import even_load


def sent_bytes(cfg: Config, cost: CostModel, layout: Layout) -> dict[str, float]:
    """Return the bytes that leave a device in one step, by the name of the collective,
    such as "all_to_all expert rows"; empty where nothing travels, and for dense
    training, which no cost model describes.

    Rows are whole buffers of round 0, or with ragged transport those of an even load.
    """
    if cfg.router.training == "dense":
        return {}
    row_p = ExpertPlan.home_in(layout, 1).slot_to_expert_lp[0]
    pair_uu = pair_rows(layer_rows(even_load(cfg, layout), row_p, layout))
    if layout.transport != "ragged":
        pair_uu = 0 * pair_uu
    total, weights = Counter(), cost.weight_terms(layout)
    rows = cost.row_terms(pair_uu, layout)
    for term in (*rows, *weights.ahead, *weights.back, *weights.once):
        total[term.name] += cfg.model.num_moe_layers * term.bytes
    return {name: size for name, size in total.items() if size}
