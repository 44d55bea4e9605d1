"""Resolve runs without devices, and return their layouts."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from moejax.axes import AXES
from moejax.config import Config
from moejax.plan.layout import Layout
from moejax.resolve import layouts
from moejax.resolve.communication import choose_communication
from moejax.resolve.layouts import step_layout
from moejax.resolve.resolved import Resolved, resolve
from moejax.resolve.speeds import load_calibration


def make_run(cfg: Config) -> Resolved:
    """Return the resolved run of a configuration on an abstract mesh."""
    return resolve(cfg, _abstract_mesh(cfg))


def make_layout(cfg: Config, device: AbstractDevice | None = None) -> Layout:
    """Return the layout of the run's step, without resolving the policy, on devices of
    this kind (default: those of this machine)."""
    mesh = _abstract_mesh(cfg, device)
    partition = choose_communication(cfg, load_calibration(cfg), mesh).partition
    return step_layout(cfg, partition, mesh)


@contextlib.contextmanager
def aligned_slots(align_rows: int) -> Iterator[None]:
    """Resolve runs with slots that begin at multiples of `align_rows`, as they do where
    the Hopper kernels run."""

    def align(cfg, layout, mesh):
        return dataclasses.replace(layout, align_rows=align_rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "with_aligned_slots", align)
        yield


def _abstract_mesh(cfg: Config, device: AbstractDevice | None = None) -> AbstractMesh:
    types = (AxisType.Auto,) * 4
    return AbstractMesh(cfg.mesh.sizes, AXES, types, abstract_device=device)
