"""Runs resolved without devices, and their layouts."""

from jax.sharding import AbstractMesh, AxisType

from moejax.axes import AXES
from moejax.config import Config
from moejax.plan.layout import Layout
from train.resolve.resolved import Resolved, resolve


def run_of(cfg: Config) -> Resolved:
    """Return the run on an abstract mesh: its layouts, settings and choices."""
    mesh = AbstractMesh(cfg.mesh.sizes, AXES, axis_types=(AxisType.Auto,) * 4)
    return resolve(cfg, mesh)


def layout_of(cfg: Config) -> Layout:
    """Return the layout of the run's step."""
    return run_of(cfg).layout
