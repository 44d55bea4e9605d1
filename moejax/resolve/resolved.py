"""Resolved: one run, with every 'auto' and None of its configuration answered.

resolve(cfg, mesh) -> Resolved    once, at the start
run.relaid(layout) -> Resolved    the next one, when the balancer changes the layout
"""

import dataclasses
import functools

from jax.sharding import AbstractMesh, Mesh

from moejax.balance.settings import Settings
from moejax.config import Config
from moejax.kernels.device import KernelChoice
from moejax.moe.mesh_roles import MeshLayout, on_mesh
from moejax.perf.calibration import Calibration
from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.resolve import layouts
from moejax.resolve.communication import Communication, choose_communication
from moejax.resolve.kernels import choose_kernels, kernel_line
from moejax.resolve.speeds import load_calibration, make_cost_model


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What a run is. Programs make it; what they call takes it, or a part of it."""

    cfg: Config
    """As the user wrote it. Only what has no open question is read from it: sizes of
    the network, the optimizer, the data."""
    mesh: Mesh | AbstractMesh
    communication: Communication
    layout: Layout
    """Of the training step that runs now."""
    owning: Layout
    """How parameters and moments rest: every expert at its owner."""
    calibration: Calibration
    cost: CostModel
    settings: Settings
    """The balancer's."""

    @functools.cached_property
    def mesh_layout(self) -> MeshLayout:
        """The layout of the step, with the mesh axes of its layers."""
        return on_mesh(self.mesh, self.layout)

    @functools.cached_property
    def owning_on_mesh(self) -> MeshLayout:
        """The owning layout, with the mesh axes of its layers."""
        return on_mesh(self.mesh, self.owning)

    @functools.cached_property
    def kernels(self) -> dict[str, KernelChoice]:
        """By kernel, what the layers of the step take on the device that is here."""
        return choose_kernels(self.cfg, self.layout)

    @property
    def num_owners(self) -> int:
        """Devices between which the masters of experts are divided."""
        return self.communication.parts.num_owners

    def home_plan(self, layout: Layout | None = None) -> ExpertPlan:
        """Return the plan with every expert at its owner, for the step's layout or
        another one."""
        layout = self.layout if layout is None else layout
        return ExpertPlan.home_in(layout, self.cfg.model.num_moe_layers)

    def exact_layout(self, batch_size: int, width: int) -> Layout:
        """Return a layout for `batch_size` sequences of `width` tokens that drops no
        row; evaluation and generation run in it."""
        parts = self.communication.parts
        return layouts.exact_layout(self.cfg, parts, batch_size, width)

    def relaid(self, layout: Layout) -> "Resolved":
        """Return the same run with another layout of its step.

        A relayout changes slots, store, split and buffers. ValueError where `layout`
        is cut over the mesh otherwise, which parameters would have to follow.
        """
        for name in ("num_experts", "num_devices", "axes", "tensor", "domain"):
            now, new = getattr(self.layout, name), getattr(layout, name)
            if now != new:
                raise ValueError(
                    f"a relayout keeps {name}={now}, and the new layout has {new}"
                )
        return dataclasses.replace(self, layout=layout)

    def lines(self) -> list[str]:
        """Say how each open question was answered, and why."""
        return [*self.communication.lines(), kernel_line(self.kernels)]


def resolve(cfg: Config, mesh: Mesh | AbstractMesh) -> Resolved:
    """Answer every open question of a configuration, once.

    `mesh` has the run's devices, or is abstract where none are needed. Raises
    ValueError with what to do instead: for a calibration of another machine, and for
    what does not go together.
    """
    check_dense_training(cfg)
    is_abstract = isinstance(mesh, AbstractMesh)
    kind = None if is_abstract else mesh.devices.flat[0].device_kind
    calibration = load_calibration(cfg, kind)
    communication = choose_communication(cfg, calibration)
    layout = layouts.step_layout(cfg, communication.parts)
    return Resolved(
        cfg=cfg,
        mesh=mesh,
        communication=communication,
        layout=layout,
        owning=layouts.owning_layout(cfg, communication.parts),
        calibration=calibration,
        cost=make_cost_model(cfg, calibration),
        settings=layouts.balancer_settings(cfg, layout),
    )


def check_dense_training(cfg: Config) -> None:
    """Raise ValueError where dense training meets what moves experts to even the load,
    or what rounds grouped products."""
    is_home = cfg.balance.policy == "home" and cfg.dispatch.store in (None, "owned")
    if cfg.router.training == "dense" and not (
        is_home and cfg.dispatch.split != "dynamic"
    ):
        raise ValueError(
            "Router.training='dense' loads every expert alike, so that nothing is to "
            f"be balanced, and Balance.policy='{cfg.balance.policy}', Dispatch.store="
            f"{cfg.dispatch.store!r}, Dispatch.split={cfg.dispatch.split!r}: use "
            "'home', None and None"
        )
    if cfg.router.training == "dense" and cfg.dispatch.fp8 != "none":
        raise ValueError(
            "Router.training='dense' has no grouped products to take in 8 bits, and "
            f"Dispatch.fp8='{cfg.dispatch.fp8}': use 'none'"
        )
    if cfg.router.training == "dense" and cfg.dispatch.gradient_compression is not None:
        raise ValueError(
            "Router.training='dense' gathers no experts whose gradients could travel "
            "back, and "
            f"Dispatch.gradient_compression={cfg.dispatch.gradient_compression}: use "
            "None"
        )
