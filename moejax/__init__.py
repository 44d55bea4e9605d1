"""moejax: Mixture-of-Experts training on SPMD meshes with JAX, exact and balanced.

Names load when they are first used, so `import moejax` and `moejax.plan.layout` need no
jax.
"""

import importlib

_HOME = {
    "Config": "moejax.config",
    "Dispatch": "moejax.config",
    "ExpertPlan": "moejax.plan.expert_plan",
    "Layout": "moejax.plan.layout",
    "LayerSetup": "moejax.moe.setup",
    "MeshAxes": "moejax.axes",
    "Moe": "moejax.config",
    "MoeLayer": "moejax.moe.layer",
    "Placement": "moejax.moe.types",
    "Router": "moejax.config",
    "RouterLosses": "moejax.moe.types",
    "RoutingStats": "moejax.moe.types",
    "Topology": "moejax.plan.layout",
    "Transformer": "moejax.model.transformer",
    "compare_ways": "moejax.resolve.layer",
    "make_mesh": "moejax.axes",
    "make_plan": "moejax.resolve.layer",
    "moe_layer": "moejax.moe.layer",
    "router_losses": "moejax.moe.route",
    "set_up": "moejax.resolve.layer",
    "shard": "moejax.moe.setup",
    "update_bias": "moejax.moe.route",
    "weighted_loss": "moejax.moe.route",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'moejax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
