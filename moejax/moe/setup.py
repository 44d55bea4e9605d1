"""Static description of one MoE layer: what a call of it is compiled for."""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moejax.axes import OWN_NAMES, MeshAxes, axis_size, everywhere, put
from moejax.config import Model, Moe, Router
from moejax.moe.mesh_roles import MeshLayout, on_mesh
from moejax.moe.types import Placement
from moejax.moe.weights.gather import Fsdp, gather, resting_dim
from moejax.moe.weights.stores import master_param_spec
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout


@dataclasses.dataclass(frozen=True)
class LayerSetup:
    """Sizes, mesh and layout of MoE layers that are alike; hashable, so that it can be
    a static argument of a jitted function. `moejax.set_up` makes one."""

    moe: Moe
    router: Router
    d_model: int
    layout: Layout
    mesh: Mesh | AbstractMesh
    axes: MeshAxes = OWN_NAMES
    is_router_split: bool = False
    """Whether the router's matrix rests split over data and expert, as the dense
    matrices of moejax.model do, if it is large. Otherwise it is whole everywhere."""
    gradient_reduce_dtype: str = Model.gradient_reduce_dtype
    """Dtype in which gradients of experts travel (Model.gradient_reduce_dtype)."""

    @functools.cached_property
    def mesh_layout(self) -> MeshLayout:
        """The layout with the mesh axes along which the layer communicates."""
        return on_mesh(self.mesh, self.layout, self.axes)

    @property
    def num_batch_shards(self) -> int:
        """Number of devices over which a batch is split."""
        return axis_size(self.mesh_layout.mesh, self.mesh_layout.batch_axes)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of the layer's input and output, which are split over the batch
        alone."""
        return NamedSharding(self.mesh_layout.mesh, P(self.mesh_layout.batch_axes))

    def param_sharding(self, dims: str | None = None) -> NamedSharding:
        """Return the sharding of a parameter. Expert weights, of dims 'edf' or 'efd',
        are split over their owners; the router's bias (None) is whole everywhere."""
        if dims is None:
            return NamedSharding(self.mesh_layout.mesh, P())
        spec = master_param_spec(dims, self.layout.store, self.mesh_layout)
        return NamedSharding(self.mesh_layout.mesh, spec)

    @property
    def router_fsdp(self) -> Fsdp:
        """How the router's matrix rests. It is used in float32, in which its gradient
        travels too."""
        return Fsdp(self.mesh_layout.fsdp_axes, None, "float32")

    @property
    def router_dim(self) -> int | None:
        """Dim along which the router's matrix is split where it rests, or None."""
        if not self.is_router_split:
            return None
        mesh_layout, shape = self.mesh_layout, (self.d_model, self.moe.num_experts)
        return resting_dim(shape, axis_size(mesh_layout.mesh, mesh_layout.fsdp_axes))

    @property
    def router_spec(self) -> P:
        """PartitionSpec of the router's matrix."""
        return self.router_fsdp.spec(self.router_dim)

    def whole_router(self, part: Array, x_nd: Array) -> Float[Array, "d e"]:
        """Return the router's whole matrix, from this device's part of it, varying over
        the mesh axes of `x_nd`. For use inside shard_map."""
        (router_de,) = gather((part,), (self.router_dim,), x_nd, self.router_fsdp)
        return router_de

    def home_plan(self, num_layers: int = 1) -> ExpertPlan:
        """Return the plan with every expert at its owner and nowhere else."""
        return ExpertPlan.home_in(self.layout, num_layers)

    def place(self, plan: ExpertPlan | None = None, num_layers: int = 1) -> Placement:
        """Return a plan (default: the home plan) as arrays on the mesh, whole on every
        device, with a leading dim of layers. A call takes one of them: `.layer(i)`.

        Raises ValueError where the plan does not fit the layout. Placements of one
        layout have the same shapes: exchanging them compiles nothing.
        """
        plan = self.home_plan(num_layers) if plan is None else plan
        if not isinstance(plan, ExpertPlan):
            raise ValueError(
                f"place takes an ExpertPlan, and got {type(plan).__name__}: "
                "ExpertPlan(table, num_experts), or num_layers=.. for the home plan"
            )
        placement = Placement.from_plan(plan.validate(self.layout), self.layout)
        return everywhere(placement, self.mesh_layout.mesh)

    def check(
        self,
        x_btd: Array,
        placement: Placement,
        forced_btk: Array | None = None,
        jitter_btd: Array | None = None,
        num_parts: int = 1,
    ) -> None:
        """Raise ValueError, one line, for arguments of a call that do not fit. x_btd is
        one of `num_parts` parts of a batch."""
        self._check_mesh()
        self._check_batch(x_btd, num_parts)
        _check_placement(placement, self.layout)
        b, t, _ = x_btd.shape
        if forced_btk is None and self.router.kind == "recorded":
            raise ValueError(
                "Router.kind='recorded' follows recorded choices: pass forced_btk "
                f"[{b}, {t}, {self.moe.top_k}]"
            )
        given = (("forced_btk", forced_btk, self.moe.top_k, jnp.integer),)
        given += (("jitter_btd", jitter_btd, self.d_model, jnp.floating),)
        for name, value, last, kind in given:
            if value is None:
                continue
            if value.shape != (b, t, last) or not jnp.issubdtype(value.dtype, kind):
                raise ValueError(
                    f"{name} must be {kind.__name__} [{b}, {t}, {last}], as x_btd "
                    f"and top_k={self.moe.top_k} say, and is {value.dtype} "
                    f"{list(value.shape)}"
                )

    def check_params(self, params: Mapping[str, Array]) -> None:
        """Raise ValueError, one line, unless a layer has the sizes and the biases that
        the setup says, and no other biases."""
        sizes = self.moe.num_experts, self.d_model, self.moe.d_expert
        actual = params["gate_edf"].shape
        if actual != sizes:
            raise ValueError(
                f"the layer has experts, width and hidden width {actual}, and the "
                f"setup {sizes}: make both from the same Moe and width"
            )
        for name, field, value in (
            ("down_bias_ew", "Moe.expert_bias", self.moe.expert_bias),
            ("logit_bias_e", "Router.bias", self.router.bias),
        ):
            if (name in params) != value:
                raise ValueError(
                    f"{field} is {value} in the setup, and the layer was made "
                    f"{'without' if value else 'with'} {name}: make it by MoeLayer("
                    "moe, d_model, rngs, router_bias=router.bias) of the same settings"
                )

    def _check_mesh(self) -> None:
        context, own = jax.sharding.get_abstract_mesh(), self.mesh_layout.mesh
        if not context.empty and context.axis_names != own.axis_names:
            raise ValueError(
                f"jax.set_mesh has a mesh with axes {context.axis_names}, and the "
                f"layer runs on {own.axis_names}: call it outside of set_mesh, or "
                "with a schedule and a domain that cut no axis in two"
            )

    def _check_batch(self, x_btd: Array, num_parts: int) -> None:
        shape, shards = x_btd.shape, self.num_batch_shards
        if x_btd.ndim != 3 or shape[-1] != self.d_model:
            raise ValueError(
                f"x_btd must be [batch, length, {self.d_model}], as the layer was set "
                f"up for, and is {list(shape)}"
            )
        if not jnp.issubdtype(x_btd.dtype, jnp.floating):
            raise ValueError(f"x_btd must be floating point, and is {x_btd.dtype}")
        if shape[0] % shards:
            raise ValueError(
                f"a batch of {shape[0]} sequences does not divide over {shards} "
                f"devices (mesh axes {', '.join(self.mesh_layout.batch_axes)}): use a "
                f"multiple of {shards}"
            )
        tensor, tokens = self.layout.tensor, shape[0] // shards * shape[1]
        if tensor is not None and tokens % tensor.num_parts:
            raise ValueError(
                f"schedule='{tensor.schedule}' splits the {tokens} tokens of a device "
                f"in {tensor.num_parts} parts: use a batch and length that they divide"
            )
        if num_parts == 1:
            self.layout.check_halves(tokens)


def _check_placement(placement: Placement, layout: Layout) -> None:
    shape = placement.slot_to_expert_lp.shape
    if len(shape) == 2:
        raise ValueError(
            f"the placement is of {shape[0]} layers, and a call takes that of one: "
            "pass placement.layer(i)"
        )
    if shape != (layout.num_slots,):
        raise ValueError(
            f"the placement has {shape[0]} slots, and the layout "
            f"{layout.num_slots}: make it by place() of the same setup"
        )
    offers_wo, want_wc = placement.offer_lwo.shape, placement.want_lwc.shape
    there = layout.of_copies
    expected = (there.offers_per_device, there.copies_per_device)
    if (offers_wo[-1], want_wc[-1]) != expected:
        raise ValueError(
            f"the placement has (offers, copies) {(offers_wo[-1], want_wc[-1])} for "
            f"each device, and the layout {expected}: make it by place() of the same "
            "setup"
        )


def shard(model, setup: LayerSetup):
    """Put the variables of a model, an optimizer, or a tuple of both on the mesh.

    Weights of experts, and optimizer moments of the same shapes, go to their owners;
    what is on one device becomes whole on all; what is spread over the mesh already
    stays. A step that takes and returns them compiles once. Inside a jitted function
    that makes a model, experts never exist whole on one device. Returns `model`, which
    is changed in place.
    """
    if not isinstance(setup, LayerSetup):
        raise ValueError(
            "shard takes what is put on the mesh and a LayerSetup, and got "
            f"{type(setup).__name__} as the second"
        )
    num_devices = setup.mesh_layout.mesh.size

    def lay(_, variable: nnx.Variable) -> nnx.Variable:
        value, dims = variable[...], variable.get_metadata().get("expert_dims")
        if dims is None and not _is_on_one(value, num_devices):
            return variable
        return variable.replace(put(value, setup.param_sharding(dims)))

    nnx.update(model, nnx.map_state(lay, nnx.state(model)))
    return model


def _is_on_one(value: Array, num_devices: int) -> bool:
    """Return whether a concrete array is on fewer devices than the mesh has."""
    is_traced = isinstance(value, jax.core.Tracer)
    return not is_traced and len(value.sharding.device_set) < num_devices
