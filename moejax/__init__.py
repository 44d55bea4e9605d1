"""moejax: Mixture-of-Experts training on SPMD meshes with JAX, exact and balanced.

Names load when they are first used, so `import moejax` and `moejax.layout` need no jax.
"""

import importlib

_HOME = {
    "Config": "moejax.config",
    "ExpertPlan": "moejax.plan",
    "Layout": "moejax.layout",
    "Topology": "moejax.layout",
    "make_mesh": "moejax.axes",
    "Placement": "moejax.types",
    "RoutingStats": "moejax.types",
    "MoeLayer": "moejax.moe.layer",
    "Transformer": "moejax.model.transformer",
}

__all__ = list(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'moejax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
