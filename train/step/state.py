"""The state of a run: made sharded, in logical expert order, and nothing else.

Everything that a resumed run needs lies in `TrainState` or is a function of its step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jax.sharding import Mesh

from moejax import axes
from moejax.config import Config
from moejax.model.sharding import param_sharding
from moejax.model.transformer import Transformer
from moejax.moe.layer import RouterBias
from moejax.moe.mesh_roles import on_mesh
from moejax.moe.weights import stores
from moejax.moe.weights.compression import wide
from moejax.moe.weights.domains import entries, tracked_axes
from moejax.moe.weights.gradient_compression import kept_axes
from moejax.plan.layout import Store
from train.layouts import layout_of, owning_layout
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
    kept_gradients: jax.Array | None = None
    """What each device has kept back of gradients that travel compressed, [l, s, x] in
    the order of moejax.moe.weights.gradient_compression.kept_axes: its own for every
    expert of its domain. A gradient of the mean loss per token. None where they travel
    whole."""


def graph_of(cfg: Config, mesh: Mesh) -> nnx.GraphDef:
    """The model's structure, without any array."""
    return nnx.split(_abstract_model(cfg, mesh))[0]


def init_state(
    cfg: Config, mesh: Mesh, optimizer, store: Store = "owned"
) -> TrainState:
    """A new state on its devices, the same numbers on any mesh."""
    make = jax.jit(
        lambda: _with_domains(_make_state(cfg, mesh, optimizer), cfg, mesh),
        out_shardings=jax.tree.map(
            lambda leaf: leaf.sharding, abstract_state(cfg, mesh, optimizer, store)
        ),
    )
    return make()


def abstract_state(
    cfg: Config, mesh: Mesh, optimizer, store: Store = "owned"
) -> TrainState:
    """Shapes, dtypes and shardings of the state: masters and moments fully sharded,
    those of experts as the store wants them."""
    shapes = jax.eval_shape(
        lambda: _with_domains(_make_state(cfg, mesh, optimizer), cfg, mesh)
    )
    _, params, _ = nnx.split(_abstract_model(cfg, mesh), nnx.Param, RouterBias)
    mesh_layout = on_mesh(mesh, owning_layout(cfg))
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
        tracked=None if shapes.tracked is None else _where_tracked(cfg, mesh),
        kept_gradients=(
            None if shapes.kept_gradients is None else _where_kept(cfg, mesh)
        ),
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        shapes,
        shardings,
    )


def with_tracked(state: TrainState, cfg: Config, mesh: Mesh) -> TrainState:
    """The state with what domains hold of its experts: moved on by what compression
    lets through; begun where there was nothing yet."""
    layout = layout_of(cfg)
    if layout.domain is None or layout.domain.form == "none":
        return state
    dtype = jnp.dtype(cfg.model.compute_dtype)
    masters, _ = expert_params.take(state.params)
    tracked = stores.tracked(masters, state.tracked, on_mesh(mesh, layout), dtype)
    return state.replace(tracked=tracked)


def tracked_anew(state: TrainState, cfg: Config, mesh: Mesh) -> TrainState:
    """The state with what domains hold as at a run's beginning."""
    begin = jax.jit(
        lambda params: (
            with_tracked(state.replace(params=params, tracked=None), cfg, mesh).tracked
        ),
        out_shardings=_where_tracked(cfg, mesh),
    )
    return state.replace(tracked=begin(state.params))


def keeping_nothing(state: TrainState, cfg: Config, mesh: Mesh) -> TrainState:
    """The state with nothing kept back of gradients that travel compressed, as at a
    run's beginning."""
    where = _where_kept(cfg, mesh)
    zeros = jax.jit(lambda: _nothing_kept(cfg, mesh), out_shardings=where)
    return state.replace(kept_gradients=zeros())


def compresses_gradients(cfg: Config) -> bool:
    domain = layout_of(cfg).domain
    return domain is not None and domain.gradient_compression is not None


def _with_domains(state: TrainState, cfg: Config, mesh: Mesh) -> TrainState:
    """The state with what domains hold at a run's beginning."""
    kept = _nothing_kept(cfg, mesh) if compresses_gradients(cfg) else None
    return with_tracked(state.replace(kept_gradients=kept), cfg, mesh)


def _nothing_kept(cfg: Config, mesh: Mesh) -> jax.Array:
    """Zeros; ValueError where not one entry fits."""
    layout, size = layout_of(cfg), 3 * cfg.model.d_model * cfg.moe.d_expert
    mesh_layout, dtype = on_mesh(mesh, layout), jnp.dtype(cfg.model.compute_dtype)
    parts = axes.axis_size(mesh_layout.mesh, mesh_layout.width_axes)
    entries(size // parts, dtype, layout.domain.gradient_compression)
    num_held = cfg.moe.num_experts * layout.domain_size
    return jnp.zeros((cfg.model.num_moe_layers, num_held, size), wide(dtype))


def _where_kept(cfg: Config, mesh: Mesh) -> jax.sharding.NamedSharding:
    mesh_layout = on_mesh(mesh, layout_of(cfg))
    dims = (dim or None for dim in kept_axes(mesh_layout))
    return axes.sharding(mesh_layout.mesh, *dims)


def _where_tracked(cfg: Config, mesh: Mesh) -> jax.sharding.NamedSharding:
    mesh_layout = on_mesh(mesh, layout_of(cfg))
    dims = (dim or None for dim in tracked_axes(mesh_layout))
    return axes.sharding(mesh_layout.mesh, *dims)


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
    of_domains = {"tracked": state.tracked, "kept_gradients": state.kept_gradients}
    there = {name: leaf for name, leaf in of_domains.items() if leaf is not None}
    return kinds | {name: held(leaf) for name, leaf in there.items()}


def _abstract_model(cfg: Config, mesh: Mesh) -> Transformer:
    return nnx.eval_shape(lambda: Transformer(cfg, mesh, nnx.Rngs(cfg.train.seed)))


def _make_state(cfg: Config, mesh: Mesh, optimizer) -> TrainState:
    model = Transformer(cfg, mesh, nnx.Rngs(cfg.train.seed))
    _, params, router_bias = nnx.split(model, nnx.Param, RouterBias)
    params = nnx.to_pure_dict(params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        router_bias=nnx.to_pure_dict(router_bias),
        opt_state=optimizer.init(params),
        key=jax.random.key_data(jax.random.key(cfg.train.seed)),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )
