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
from moejax.layout import Store
from moejax.model.sharding import param_spec
from moejax.model.transformer import Transformer
from moejax.moe.layer import RouterBias


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


def graph_of(cfg: Config, mesh: Mesh) -> nnx.GraphDef:
    """The model's structure, without any array."""
    return nnx.split(_abstract_model(cfg, mesh))[0]


def init_state(
    cfg: Config, mesh: Mesh, optimizer, store: Store = "owned"
) -> TrainState:
    """A new state on its devices, the same numbers on any mesh."""
    make = jax.jit(
        lambda: _make_state(cfg, mesh, optimizer),
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
    shapes = jax.eval_shape(lambda: _make_state(cfg, mesh, optimizer))
    _, params, _ = nnx.split(_abstract_model(cfg, mesh), nnx.Param, RouterBias)
    specs = nnx.to_pure_dict(
        nnx.map_state(
            lambda path, variable: param_spec(
                variable,
                mesh,
                path[0] in ("prefix", "cycles"),
                store,
                cfg.moe.group_axes,
            ),
            params,
        )
    )

    def on(spec):
        return jax.sharding.NamedSharding(mesh, spec)

    whole = axes.sharding(mesh)
    param_shardings = jax.tree.map(on, specs, is_leaf=_is_spec)
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
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        shapes,
        shardings,
    )


def bytes_per_device(state: TrainState) -> dict[str, int]:
    """Bytes that one device holds, by kind."""

    def held(tree) -> int:
        leaves = jax.tree.leaves(tree)
        shards = (leaf.sharding.shard_shape(leaf.shape) for leaf in leaves)
        sizes = zip(leaves, shards, strict=True)
        return sum(
            jnp.dtype(x.dtype).itemsize * int(jnp.prod(jnp.array(s))) for x, s in sizes
        )

    return {"params": held(state.params), "moments": held(state.opt_state)}


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


def _is_spec(leaf) -> bool:
    return isinstance(leaf, jax.sharding.PartitionSpec)
