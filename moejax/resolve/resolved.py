"""Resolution of a configuration into a run: every 'auto' and None gets an answer.

resolve(cfg, mesh) -> Resolved    once, at the start
run.relaid(layout) -> Resolved    again, when the balancer changes the layout
"""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Mapping

from jax.sharding import AbstractMesh, Mesh

from moejax.axes import devices_of
from moejax.balance.overflows import Prices
from moejax.balance.policies import AUTO, check_on_skewed_load
from moejax.balance.settings import Settings, find_policy
from moejax.choice import Choice
from moejax.config import Config
from moejax.kernels.device import device_here
from moejax.model.parameters import check_frozen
from moejax.moe import recorded
from moejax.moe.mesh_roles import MeshLayout, on_mesh
from moejax.perf.calibration import Calibration
from moejax.perf.cluster import Cluster, of_device
from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Gather, Layout
from moejax.resolve import gather, layouts
from moejax.resolve.communication import choose_communication
from moejax.resolve.kernels import check_attention, choose_kernels
from moejax.resolve.memory import state_bytes, step_memory
from moejax.resolve.methods import find_methods
from moejax.resolve.partition import Partition, micro_batch_tokens
from moejax.resolve.speeds import (
    load_calibration,
    make_cost_model,
    make_overflow_prices,
)


@dataclasses.dataclass(frozen=True)
class Resolved:
    """A run, in which every open question of its configuration has an answer."""

    cfg: Config
    """Configuration as the user wrote it. Read from it only what no 'auto' or None can
    stand for: sizes of the network, the optimizer, the data."""
    mesh: Mesh | AbstractMesh
    """Mesh of the run's devices, or an abstract one where no device is needed."""
    partition: Partition
    """Partition of the layers over the mesh."""
    layout: Layout
    """Layout of the train step that runs now."""
    owning: Layout
    """Layout in which parameters and moments rest: every expert is at its owner."""
    calibration: Calibration
    """Speeds of the mesh, measured or presumed."""
    cost: CostModel
    """Cost model of the layers at these speeds."""
    settings: Settings
    """Settings of the balancer."""
    chosen: Mapping[str, Choice] = dataclasses.field(default_factory=dict)
    """Choices that predictions have made, by the field that they answer: 'policy',
    'schedule', 'domain', 'gather'."""

    @functools.cached_property
    def mesh_layout(self) -> MeshLayout:
        """Layout of the step, with the mesh axes of its layers."""
        return on_mesh(self.mesh, self.layout)

    @functools.cached_property
    def owning_on_mesh(self) -> MeshLayout:
        """Owning layout, with the mesh axes of its layers."""
        return on_mesh(self.mesh, self.owning)

    @functools.cached_property
    def kernels(self) -> dict[str, Choice[str]]:
        """Kernel implementations of the step's layers, on the devices of the mesh; on
        the device of this machine where the mesh is abstract and names none."""
        with devices_of(self.mesh):
            return choose_kernels(self.cfg, self.layout)

    @property
    def overflow_prices(self) -> Prices:
        """Prices of loop-free and exact steps, for a layout with overflow 'redo'."""
        return make_overflow_prices(self.cfg, self.cost)

    @property
    def num_owners(self) -> int:
        """Number of devices that share out the experts of each layer."""
        return self.partition.num_owners

    @property
    def filled_rows(self) -> float:
        """Share of the rows that a device can compute in round 0 which it does, if the
        load is even."""
        tokens = micro_batch_tokens(self.cfg)
        choices = self.partition.source_tokens(tokens) * self.cfg.moe.top_k
        view = self.layout.exchanged
        room = view.num_exchanges * view.rows_per_device * view.num_devices
        return min(1.0, view.num_sources * choices / room)

    def home_plan(self, layout: Layout | None = None) -> ExpertPlan:
        """Return the plan with every expert at its owner, for the step's layout or
        another one."""
        layout = self.layout if layout is None else layout
        return ExpertPlan.home_in(layout, self.cfg.model.num_moe_layers)

    def check_policy(self) -> None:
        """Raise ValueError where the balancing policy, or one of those that 'auto' may
        take, makes an invalid plan for a synthetic skewed load."""
        num_layers, settings = self.cfg.model.num_moe_layers, self.settings
        pairs = [(method.policy, method.layout) for method in settings.methods]
        for name, layout in pairs or [(settings.policy, self.layout)]:
            if name != "home":
                policy = find_policy(settings, name)
                check_on_skewed_load(name, policy, layout, self.cost, num_layers)

    def recorded_sha256(self) -> str | None:
        """Return the sha256 of the recorded loads that the router follows, or None
        where it chooses by itself. Raises ValueError for loads that cannot be read."""
        cfg = self.cfg
        if cfg.router.kind != "recorded":
            return None
        sizes = (cfg.model.num_moe_layers, cfg.moe.num_experts, cfg.moe.top_k)
        table_tle = recorded.loads(cfg.recorded, *sizes)
        return hashlib.sha256(table_tle.tobytes()).hexdigest()

    def exact_layout(self, batch_size: int, width: int) -> Layout:
        """Return a layout for `batch_size` sequences of `width` tokens that drops no
        row; evaluation and generation run in it."""
        return layouts.exact_layout(
            self.cfg, self.partition, batch_size, width, self.mesh
        )

    def relaid(self, layout: Layout) -> "Resolved":
        """Return the same run with another layout of its step.

        A relayout changes slots, store, split, buffers, communication schedule and
        domain. Raises ValueError where experts have other owners or shards in `layout`,
        since the parameters would have to move, and where it treats overflows or the
        rows of slots in another way.
        """
        kept = "num_experts", "num_devices", "axes", "shards", "overflow", "align_rows"
        for name in kept:
            now, new = getattr(self.layout, name), getattr(layout, name)
            if now != new:
                raise ValueError(
                    f"a relayout keeps {name}={now}, and the new layout has {new}"
                )
        return dataclasses.replace(self, layout=layout)

    def choices(self) -> dict[str, Choice]:
        """Return every choice of the run, in the order in which they are printed."""
        args = self.cfg, self.layout, self.partition, self.mesh
        return {
            **self.chosen,
            **self.kernels,
            "gradients": self._gradient_dtype(),
            "overflow": layouts.choose_overflow(*args),
        }

    def lines(self) -> list[str]:
        """Return lines that say how each None and 'auto' was answered, and why."""
        choices = self.choices().items()
        lines = [line for name, choice in choices for line in choice.lines(name)]
        if answers := self._answers():
            lines.append(f"None, so chosen    {', '.join(answers)}")
        if self.chosen or self.settings.policy != "home":
            lines.append(f"speeds             {self.speeds}")
        return lines

    def _gradient_dtype(self) -> Choice[str]:
        """Return the dtype in which gradients of dense matrices and experts travel.

        Along dc, and of copies of experts, see Model.gradient_reduce_dtype.
        """
        model = self.cfg.model
        dtype, named_by = model.gradient_reduce_dtype, "Model.gradient_reduce_dtype"
        if model.compute_dtype == "float32":
            dtype, named_by = "float32", "as Model.compute_dtype"
        how = "reduce-scatter" if dtype == "float32" else "all_to_all"
        return Choice(
            dtype,
            f"of dense matrices and experts, by {how}, summed in float32 ({named_by}); "
            "those of router, embedding and head travel in float32",
        )

    @property
    def speeds(self) -> str:
        """Source of the cost model's speeds: measured, stated or presumed."""
        if self.calibration.is_measured:
            return f"measured, in {self.cfg.balance.calibration}"
        source, flops = self.calibration.when, self.calibration.flops_per_sec
        if source == "stated":
            source = f"those stated for {self.calibration.device_kind}"
        rates = f"{1e-12 * flops:g} TFLOP/s of experts"
        if math.isfinite(size := self.cost.bytes_per_sec):
            rates += f" and {1e-9 * size:.3g} GB/s of exchange"
        return (
            f"{source}, {rates} per device (Balance.calibration = None): modelled "
            "times are rough"
        )

    def _answers(self) -> list[str]:
        """Return the fields of Dispatch and Balance that are None, with their values in
        this run."""
        parts = [("dispatch", self.layout)]
        parts += [("balance", self.settings)] * (self.settings.policy != "home")
        return [
            f"{part.title()}.{field.name} = {getattr(answers, field.name)!r}"
            for part, answers in parts
            for field in dataclasses.fields(getattr(self.cfg, part))
            if getattr(getattr(self.cfg, part), field.name) is None
            and getattr(answers, field.name, None) is not None
        ]


def resolve(
    cfg: Config,
    mesh: Mesh | AbstractMesh,
    usable_bytes: int | None = None,
    cluster: Cluster | None = None,
) -> Resolved:
    """Return the run of a configuration, with an answer to each 'auto' and None.

    `mesh` has the run's devices, or is abstract where none are needed. `usable_bytes`
    are those of a device that a run may use; None: they are not known, and what could
    be kept in them is not (Dispatch.gather). `cluster` is the one whose stated
    rates count without a calibration; None: the devices on nodes of 8, if their kind is
    known. Raises ValueError for a calibration of another machine and for settings that
    contradict one another, and NotImplementedError for attention that the devices
    cannot compute; the message says what to do instead.
    """
    check_dense_training(cfg)
    check_frozen(cfg.network, cfg.optimizer.frozen)
    check_attention(cfg, mesh)
    check_split(cfg, mesh)
    is_abstract = isinstance(mesh, AbstractMesh)
    kind = None if is_abstract else mesh.devices.flat[0].device_kind
    with devices_of(mesh):  # an abstract mesh may name a device
        here = device_here().device_kind
    cluster = cluster or of_device(here, cfg.mesh.num_devices)
    calibration = load_calibration(cfg, kind, cluster)
    found = choose_communication(cfg, calibration, mesh)
    partition, chosen = found.partition, found.choices
    cost = make_cost_model(cfg, calibration)
    layout = layouts.with_shadow_prices(layouts.step_layout(cfg, partition, mesh), cost)
    methods = ()
    if cfg.balance.policy == AUTO:
        args = found.named, layout, mesh, calibration, usable_bytes
        methods, choice = find_methods(*args)
        chosen = {"policy": choice, **chosen}
    run = Resolved(
        cfg=cfg,
        mesh=mesh,
        partition=partition,
        layout=layout,
        owning=layouts.owning_layout(cfg, partition),
        calibration=calibration,
        cost=cost,
        settings=layouts.balancer_settings(cfg, layout, found.layouts, methods),
        chosen=chosen,
    )
    return run if usable_bytes is None else _with_gather(run, usable_bytes)


def _with_gather(run: Resolved, usable_bytes: int) -> Resolved:
    """Return the run with Dispatch.gather chosen by predicted times and memory, if it
    is None and there is a choice."""
    cfg, layout, cost = run.cfg, run.layout, run.cost
    is_dense = cfg.router.training == "dense"
    if is_dense or not gather.is_open(cfg.dispatch.gather, layout, cost):
        return run
    attention = run.kernels["attention"].value

    def predict(way: Gather) -> gather.Cost:
        there = dataclasses.replace(layout, gather=way)
        sec = cfg.model.num_moe_layers * cost.weight_terms(there).sec
        parts = step_memory(cfg, there, state_bytes(cfg), attention)
        return gather.Cost(sec, sum(parts.values()))

    choice = gather.choose(predict("layer"), predict("step"), usable_bytes)
    if choice.value == "step" and cfg.dispatch.prefetch is None:
        layout = dataclasses.replace(layout, prefetch=False)  # layers fetch nothing
    layout = dataclasses.replace(layout, gather=choice.value)
    return dataclasses.replace(
        run, layout=layout, chosen={**run.chosen, "gather": choice}
    )


def check_split(cfg: Config, mesh: Mesh | AbstractMesh) -> None:
    """Raise NotImplementedError for split 'top_up' on GPUs: the host would wait at each
    step of its search, whose length the devices alone know."""
    with devices_of(mesh):
        platform = device_here().platform
    if cfg.dispatch.split == "top_up" and platform != "cpu":
        raise NotImplementedError(
            "Dispatch.split='top_up' searches in loops whose length the devices alone "
            "know, at which the host of a GPU waits: use 'dynamic' or 'water_filling'"
        )


def check_dense_training(cfg: Config) -> None:
    """Raise ValueError where dense training is combined with balancing, fp8 or gradient
    compression."""
    is_home = cfg.balance.policy == "home" and cfg.dispatch.store in (None, "owned")
    if cfg.router.training == "dense" and not (
        is_home and not cfg.dispatch.makes_replicas
    ):
        raise ValueError(
            "Router.training='dense' loads every expert alike, so that there is "
            f"nothing to balance, and Balance.policy='{cfg.balance.policy}', "
            f"Dispatch.store={cfg.dispatch.store!r}, Dispatch.split="
            f"{cfg.dispatch.split!r}: use 'home', None and None"
        )
    if cfg.router.training == "dense" and cfg.dispatch.fp8 != "none":
        raise ValueError(
            "Router.training='dense' has no grouped products to compute in 8 bits, and "
            f"Dispatch.fp8='{cfg.dispatch.fp8}': use 'none'"
        )
    if cfg.router.training == "dense" and cfg.dispatch.gather == "step":
        raise ValueError(
            "Router.training='dense' has no slots to gather once a step: use "
            "Dispatch.gather = None"
        )
