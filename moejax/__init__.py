"""moejax: Mixture-of-Experts training on SPMD meshes with JAX, exact and balanced.

Names load when they are first used, so `import moejax` and `moejax.plan.layout` need no
jax.
"""

import importlib

_HOME = {
    "Config": "moejax.config",
    "ExpertPlan": "moejax.plan.expert_plan",
    "Layout": "moejax.plan.layout",
    "Topology": "moejax.plan.layout",
    "make_mesh": "moejax.axes",
    "Placement": "moejax.moe.types",
    "RoutingStats": "moejax.moe.types",
    "MoeLayer": "moejax.moe.layer",
    "Transformer": "moejax.model.transformer",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'moejax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
