"""The state of a training run, made in shards on its devices, in logical expert order.

A `TrainState` and functions of its step are all that a resumed run needs.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct

from moejax import axes
from moejax.config import Optimizer
from moejax.model.sharding import param_sharding
from moejax.model.transformer import Transformer
from moejax.moe.layer import RouterBias
from moejax.moe.weights.domains import tracked_axes
from moejax.moe.weights.slots import track_experts
from moejax.plan.layout import Store
from moejax.resolve.resolved import Resolved
from train.step import expert_params
from train.step.optimizer import trained


@struct.dataclass
class TrainState:
    """State of a run between two train steps."""

    step: jax.Array
    """Number of updates so far, skipped ones included."""
    params: Any
    """float32 master parameters; those of stacked layers have a leading layer dim."""
    router_bias: Any
    """Biases that Router.bias_rate moves; no gradient reaches them."""
    opt_state: optax.OptState
    """State of the optimizer, with the moments of all parameters that train."""
    key: jax.Array
    """Data of the random key from which each step's key is folded."""
    skipped_in_a_row: jax.Array
    """Number of updates skipped since the last one that was finite."""
    tracked: jax.Array | None = None
    """Weights that a domain's devices hold of experts that travel compressed, [l, s, x]
    in the order of moejax.moe.weights.domains.tracked_axes. None: no expert does."""


def model_graph(run: Resolved, is_gathered: bool = False) -> nnx.GraphDef:
    """Return the structure of the model, without any array.

    `is_gathered`: its dense parameters are whole over data and expert already, so that
    layers gather none.
    """
    model = _abstract_model(run)
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Param):
            is_dense = variable.get_metadata().get("expert_dims") is None
            variable.set_metadata(is_gathered=is_gathered and is_dense)
    return nnx.split(model)[0]


def init_state(run: Resolved, optimizer, store: Store = "owned") -> TrainState:
    """Return the state at the start of a run, on its devices.

    The numbers are the same on any mesh.
    """
    make = jax.jit(
        lambda: with_tracked(_make_state(run, optimizer), run),
        out_shardings=jax.tree.map(
            lambda leaf: leaf.sharding, abstract_state(run, optimizer, store)
        ),
    )
    return make()


def state_from(
    params, router_bias, run: Resolved, optimizer, store: Store = "owned"
) -> TrainState:
    """Return the state at the start of a run whose parameters and router bias are given
    on its devices, with the shardings of `abstract_state`.

    All else is as in `init_state`, the random key too.
    """
    abstract = abstract_state(run, optimizer, store)

    def without_params(state: TrainState) -> TrainState:
        return state.replace(params=None, router_bias=None, tracked=None)

    # XLA drops the parameters that _make_state draws: nothing here depends on them.
    make = jax.jit(
        lambda: without_params(_make_state(run, optimizer)),
        out_shardings=jax.tree.map(
            lambda leaf: leaf.sharding, without_params(abstract)
        ),
    )
    state = make().replace(params=params, router_bias=router_bias)
    if abstract.tracked is not None:
        state = with_new_tracked(state, run)
    return state


def abstract_state(run: Resolved, optimizer, store: Store = "owned") -> TrainState:
    """Return the shapes, dtypes and shardings of the state.

    Master parameters and moments are fully sharded; those of experts lie as the store
    requires.
    """
    shapes = jax.eval_shape(lambda: with_tracked(_make_state(run, optimizer), run))
    whole, of_params = axes.sharding(run.mesh), param_shardings(run, store)
    shardings = TrainState(
        step=whole,
        params=of_params,
        router_bias=jax.tree.map(lambda _: whole, shapes.router_bias),
        opt_state=optax.tree.map_params(
            optimizer,
            lambda leaf, sharding: leaf if _is_masked(leaf) else sharding,
            shapes.opt_state,
            trained(of_params, run.cfg.optimizer),
            transform_non_params=lambda _: whole,
            is_leaf=_is_masked,
        ),
        key=whole,
        skipped_in_a_row=whole,
        tracked=None if shapes.tracked is None else _tracked_sharding(run),
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        shapes,
        shardings,
    )


def param_shardings(run: Resolved, store: Store = "owned"):
    """Return the shardings in which the parameters rest, frozen ones too."""
    _, params, _ = nnx.split(_abstract_model(run), nnx.Param, RouterBias)
    mesh, mesh_layout = run.mesh, run.owning_on_mesh
    return nnx.to_pure_dict(
        nnx.map_state(
            lambda path, variable: param_sharding(
                variable, mesh, mesh_layout, path[0] in ("prefix", "cycles"), store
            ),
            params,
        )
    )


def _is_masked(leaf) -> bool:
    """Return whether a leaf stands for a parameter of another optimizer."""
    return isinstance(leaf, optax.MaskedNode)


def with_tracked(state: TrainState, run: Resolved) -> TrainState:
    """Return the state with updated copies of compressed experts, after the devices of
    each domain have sent one another the changes.

    `tracked`, which holds these copies, moves towards the new parameters by the entries
    that compression sends. It is made anew where it is None. Without compressed experts
    the state stays as it is.
    """
    domain = run.layout.domain
    if domain is None or domain.compression is None:
        return state
    dtype = jnp.dtype(run.cfg.model.compute_dtype)
    master_params, _ = expert_params.take(state.params)
    tracked = track_experts(master_params, state.tracked, run.mesh_layout, dtype)
    return state.replace(tracked=tracked)


def with_new_tracked(state: TrainState, run: Resolved) -> TrainState:
    """Return the state with its copies of compressed experts, `tracked`, made anew from
    the parameters, as at the start of a run."""
    make = jax.jit(
        lambda params: (
            with_tracked(state.replace(params=params, tracked=None), run).tracked
        ),
        out_shardings=_tracked_sharding(run),
    )
    return state.replace(tracked=make(state.params))


def _tracked_sharding(run: Resolved) -> jax.sharding.NamedSharding:
    """Return the sharding of TrainState.tracked."""
    dims = tracked_axes(run.mesh_layout)
    return axes.sharding(run.mesh_layout.mesh, *(dim or None for dim in dims))


def bytes_per_device(state: TrainState, optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes that one device holds of each kind of the state's arrays;
    'trained' are those of parameters that are not frozen."""

    def num_bytes(tree) -> int:
        return sum(
            leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))
            for leaf in jax.tree.leaves(tree)
        )

    trees = {"params": state.params, "moments": state.opt_state}
    trees["trained"] = trained(state.params, optimizer)
    if state.tracked is not None:
        trees["tracked"] = state.tracked
    return {name: num_bytes(tree) for name, tree in trees.items()}


def _abstract_model(run: Resolved) -> Transformer:
    """Return the model with shapes in place of arrays."""
    return nnx.eval_shape(lambda: _model(run))


def _model(run: Resolved) -> Transformer:
    """Return the model with initial parameters, seeded by Train.seed."""
    return Transformer(run.cfg.network, run.mesh, nnx.Rngs(run.cfg.train.seed))


def _make_state(run: Resolved, optimizer) -> TrainState:
    """Return the state at the start of a run, without `tracked`."""
    _, params, router_bias = nnx.split(_model(run), nnx.Param, RouterBias)
    params = nnx.to_pure_dict(params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        router_bias=nnx.to_pure_dict(router_bias),
        opt_state=optimizer.init(trained(params, run.cfg.optimizer)),
        key=jax.random.key_data(jax.random.key(run.cfg.train.seed)),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )
