"""Resolve runs without devices, and return their layouts."""

from jax.sharding import AbstractMesh, AxisType

from moejax.axes import AXES
from moejax.config import Config
from moejax.plan.layout import Layout
from moejax.resolve.communication import choose_communication
from moejax.resolve.layouts import step_layout
from moejax.resolve.resolved import Resolved, resolve
from moejax.resolve.speeds import load_calibration


def make_run(cfg: Config) -> Resolved:
    """Return the resolved run of a configuration on an abstract mesh."""
    return resolve(cfg, _abstract_mesh(cfg))


def make_layout(cfg: Config) -> Layout:
    """Return the layout of the run's step, without resolving the policy."""
    partition = choose_communication(cfg, load_calibration(cfg)).partition
    return step_layout(cfg, partition, _abstract_mesh(cfg))


def _abstract_mesh(cfg: Config) -> AbstractMesh:
    return AbstractMesh(cfg.mesh.sizes, AXES, axis_types=(AxisType.Auto,) * 4)
