"""The state of a run: made sharded, in logical expert order, and nothing else.

Everything that a resumed run needs lies in `TrainState` or is a function of its step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct

from moejax import axes
from moejax.model.sharding import param_sharding
from moejax.model.transformer import Transformer
from moejax.moe.layer import RouterBias
from moejax.moe.weights import stores
from moejax.moe.weights.compression import sum_dtype
from moejax.moe.weights.domains import entries, tracked_axes
from moejax.moe.weights.gradient_compression import residual_axes
from moejax.plan.layout import Layout, Store
from moejax.resolve.resolved import Resolved
from train.step import expert_params


@struct.dataclass
class TrainState:
    step: jax.Array
    """Updates done, skipped ones included."""
    params: Any
    """float32 masters; what is scanned has a leading layer dim."""
    router_bias: Any
    opt_state: optax.OptState
    key: jax.Array
    """Data of the random key that step keys are folded from."""
    skipped_in_a_row: jax.Array
    tracked: jax.Array | None = None
    """What domains hold of experts that travel compressed, [l, s, x] in the order of
    moejax.moe.weights.domains.tracked_axes; None where none do."""
    gradient_residual: jax.Array | None = None
    """What each device has kept back of gradients that travel compressed, [l, s, x] in
    the order of moejax.moe.weights.gradient_compression.residual_axes: its own for
    every expert of its domain. A gradient of the mean loss per token. None where they
    travel whole."""


def model_graph(run: Resolved) -> nnx.GraphDef:
    """The model's structure, without any array."""
    return nnx.split(_abstract_model(run))[0]


def init_state(run: Resolved, optimizer, store: Store = "owned") -> TrainState:
    """A new state on its devices, the same numbers on any mesh."""
    make = jax.jit(
        lambda: _with_domains(_make_state(run, optimizer), run),
        out_shardings=jax.tree.map(
            lambda leaf: leaf.sharding, abstract_state(run, optimizer, store)
        ),
    )
    return make()


def abstract_state(run: Resolved, optimizer, store: Store = "owned") -> TrainState:
    """Shapes, dtypes and shardings of the state: masters and moments fully sharded,
    those of experts as the store wants them."""
    shapes = jax.eval_shape(lambda: _with_domains(_make_state(run, optimizer), run))
    _, params, _ = nnx.split(_abstract_model(run), nnx.Param, RouterBias)
    mesh, mesh_layout = run.mesh, run.owning_on_mesh
    param_shardings = nnx.to_pure_dict(
        nnx.map_state(
            lambda path, variable: param_sharding(
                variable, mesh, mesh_layout, path[0] in ("prefix", "cycles"), store
            ),
            params,
        )
    )
    whole = axes.sharding(mesh)
    shardings = TrainState(
        step=whole,
        params=param_shardings,
        router_bias=jax.tree.map(lambda _: whole, shapes.router_bias),
        opt_state=optax.tree.map_params(
            optimizer,
            lambda _, sharding: sharding,
            shapes.opt_state,
            param_shardings,
            transform_non_params=lambda _: whole,
        ),
        key=whole,
        skipped_in_a_row=whole,
        tracked=None if shapes.tracked is None else _tracked_sharding(run),
        gradient_residual=(
            None if shapes.gradient_residual is None else _residual_sharding(run)
        ),
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        shapes,
        shardings,
    )


def with_tracked(state: TrainState, run: Resolved) -> TrainState:
    """The state with what domains hold of its experts: moved on by what compression
    lets through; begun where there was nothing yet."""
    domain = run.layout.domain
    if domain is None or domain.form == "none":
        return state
    dtype = jnp.dtype(run.cfg.model.compute_dtype)
    master_params, _ = expert_params.take(state.params)
    tracked = stores.track_experts(master_params, state.tracked, run.mesh_layout, dtype)
    return state.replace(tracked=tracked)


def with_new_tracked(state: TrainState, run: Resolved) -> TrainState:
    """The state with what domains hold as at a run's beginning."""
    begin = jax.jit(
        lambda params: (
            with_tracked(state.replace(params=params, tracked=None), run).tracked
        ),
        out_shardings=_tracked_sharding(run),
    )
    return state.replace(tracked=begin(state.params))


def with_zero_residual(state: TrainState, run: Resolved) -> TrainState:
    """The state with nothing kept back of gradients that travel compressed, as at a
    run's beginning."""
    where = _residual_sharding(run)
    zeros = jax.jit(lambda: _zero_residual(run), out_shardings=where)
    return state.replace(gradient_residual=zeros())


def compresses_gradients(layout: Layout) -> bool:
    """Return whether gradients of a domain's experts travel compressed."""
    domain = layout.domain
    return domain is not None and domain.gradient_compression is not None


def _with_domains(state: TrainState, run: Resolved) -> TrainState:
    """The state with what domains hold at a run's beginning."""
    kept = _zero_residual(run) if compresses_gradients(run.layout) else None
    return with_tracked(state.replace(gradient_residual=kept), run)


def _zero_residual(run: Resolved) -> jax.Array:
    """Zeros; ValueError where not one entry fits."""
    cfg, layout, mesh_layout = run.cfg, run.layout, run.mesh_layout
    size = 3 * cfg.model.d_model * cfg.moe.d_expert
    dtype = jnp.dtype(cfg.model.compute_dtype)
    parts = axes.axis_size(mesh_layout.mesh, mesh_layout.width_axes)
    entries(size // parts, dtype, layout.domain.gradient_compression)
    num_held = cfg.moe.num_experts * layout.domain_size
    return jnp.zeros((cfg.model.num_moe_layers, num_held, size), sum_dtype(dtype))


def _residual_sharding(run: Resolved) -> jax.sharding.NamedSharding:
    return _sharding(run, residual_axes(run.mesh_layout))


def _tracked_sharding(run: Resolved) -> jax.sharding.NamedSharding:
    return _sharding(run, tracked_axes(run.mesh_layout))


def _sharding(run: Resolved, dims) -> jax.sharding.NamedSharding:
    return axes.sharding(run.mesh_layout.mesh, *(dim or None for dim in dims))


def bytes_per_device(state: TrainState) -> dict[str, int]:
    """Bytes that one device holds, by kind."""

    def held(tree) -> int:
        leaves = jax.tree.leaves(tree)
        shards = (leaf.sharding.shard_shape(leaf.shape) for leaf in leaves)
        sizes = zip(leaves, shards, strict=True)
        return sum(
            jnp.dtype(x.dtype).itemsize * int(jnp.prod(jnp.array(s))) for x, s in sizes
        )

    kinds = {"params": held(state.params), "moments": held(state.opt_state)}
    of_domains = {
        "tracked": state.tracked,
        "gradient_residual": state.gradient_residual,
    }
    there = {name: leaf for name, leaf in of_domains.items() if leaf is not None}
    return kinds | {name: held(leaf) for name, leaf in there.items()}


def _abstract_model(run: Resolved) -> Transformer:
    return nnx.eval_shape(lambda: _model(run))


def _model(run: Resolved) -> Transformer:
    return Transformer(run.cfg.network, run.mesh, nnx.Rngs(run.cfg.train.seed))


def _make_state(run: Resolved, optimizer) -> TrainState:
    _, params, router_bias = nnx.split(_model(run), nnx.Param, RouterBias)
    params = nnx.to_pure_dict(params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        router_bias=nnx.to_pure_dict(router_bias),
        opt_state=optimizer.init(params),
        key=jax.random.key_data(jax.random.key(run.cfg.train.seed)),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )
