"""Text token by token: a prefill of the prompts, then one jitted step per token.

prompt 0   # t h e   c a t     rows begin with separators at position -1, so that
prompt 1   # # # # a   d o     all end together: a document of their own, unseen
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Float, Int

from moejax.axes import BATCH_AXES, FSDP_AXES, sharding
from moejax.config import Config
from moejax.model.cache import Cache
from train.checkpoint.load import LoadedModel
from train.resolve.resolved import Resolved
from train.step.state import model_graph

PROMPT_MULTIPLE = 32
CACHE_MULTIPLE = 128
"""Widths are rounded up to these, so that most prompts share a compiled program."""


@struct.dataclass
class Sampling:
    """How a token is drawn; values, so that another one compiles nothing."""

    temperature: Float[Array, ""] | float = 0.0
    """0 takes the likeliest."""
    top_p: Float[Array, ""] | float = 1.0
    """Only of the likeliest tokens whose shares add up to this (Holtzman et al. 2019,
    section 3.1); the likeliest is always one of them."""
    seed: Int[Array, ""] | int = 0


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A loaded model, ready to continue prompts."""

    cfg: Config
    mesh: jax.sharding.Mesh
    weights: tuple
    """Parameters, router bias and placement."""
    separator: int
    prefill: Callable
    """(*weights, token_bt, position_bt, how, capacity) -> token_b, position_b, cache:
    the next tokens, and the positions that they have."""
    step: Callable
    """(*weights, token_b, position_b, how, cache) -> the same; takes the cache away."""


def make_decoder(loaded: LoadedModel, num_ids: int, separator: int) -> Decoder:
    """Return a decoder that draws among `num_ids` tokens: a model can have more than
    its tokenizer.

    Raises ValueError for a router that cannot choose token by token.
    """
    if loaded.cfg.router.kind == "expert_choice":
        raise ValueError(
            "Router.kind='expert_choice' chooses among all tokens of a text, and those "
            "to come are not there yet: nothing can be generated"
        )
    # Dense parameters are gathered once, not in every step.
    whole = jax.tree.map(
        lambda leaf: jax.device_put(leaf, _when_used(leaf.sharding)), loaded.params
    )
    weights = whole, loaded.router_bias, loaded.placement
    programs = _programs(loaded.run, num_ids)
    return Decoder(loaded.cfg, loaded.mesh, weights, separator, *programs)


def decode(
    decoder: Decoder, prompts: Sequence[np.ndarray], max_tokens: int, how: Sampling
) -> Iterator[np.ndarray]:
    """Yield the next token of every prompt [prompts], at most `max_tokens` times.

    The token of a prompt depends on nothing but the model, the prompt, what came of it
    before, and `how`. The caller leaves when it has seen enough. The device is a step
    ahead of what is given out.
    """
    token_bt, position_bt = _rows(decoder, prompts)
    capacity = _up(token_bt.shape[1] + max_tokens, CACHE_MULTIPLE)
    spread, whole = sharding(decoder.mesh, BATCH_AXES), sharding(decoder.mesh)
    rows = jax.device_put((token_bt, position_bt), spread)
    how = jax.device_put(_as_arrays(how), whole)
    last = decoder.prefill(*decoder.weights, *rows, how, capacity)
    for left in reversed(range(max_tokens)):
        token_b, position_b, cache = last
        if left:
            last = decoder.step(*decoder.weights, token_b, position_b, how, cache)
        yield np.asarray(token_b)[: len(prompts)]


def choose(
    logits_bv: Float[Array, "b v"], position_b: Int[Array, " b"], how: Sampling
) -> Int[Array, " b"]:
    """Choose one token for each row. Noise depends on the seed and the token's position
    alone: on no other row, and not on the mesh."""
    key = jax.random.key(how.seed)

    def noise(position):
        return jax.random.gumbel(
            jax.random.fold_in(key, position), logits_bv.shape[1:], jnp.float32
        )

    warm_bv = logits_bv / jnp.where(how.temperature > 0, how.temperature, 1.0)
    share_bv = jax.nn.softmax(warm_bv, axis=-1)
    order_bv = jnp.argsort(-share_bv, axis=-1, stable=True)
    sorted_bv = jnp.take_along_axis(share_bv, order_bv, axis=-1)
    before_bv = jnp.cumsum(sorted_bv, axis=-1) - sorted_bv
    is_in_bv = (before_bv < how.top_p).at[:, 0].set(True)
    # The largest of logits with Gumbel noise is a draw from their softmax.
    drawn_bv = jnp.take_along_axis(
        warm_bv + jax.vmap(noise)(position_b), order_bv, axis=-1
    )
    place_b = jnp.argmax(jnp.where(is_in_bv, drawn_bv, -jnp.inf), axis=-1)
    drawn_b = jnp.take_along_axis(order_bv, place_b[:, None], axis=-1)[:, 0]
    likeliest_b = jnp.argmax(logits_bv, axis=-1)
    return jnp.where(how.temperature > 0, drawn_b, likeliest_b).astype(jnp.int32)


def _programs(run: Resolved, num_ids: int):
    """Return the prefill and the step of a Decoder, jitted."""
    cfg, graph = run.cfg, model_graph(run)

    def extend(params, bias, placement, token_bt, position_bt, how, cache):
        network = nnx.merge(graph, params, bias)
        layout = run.exact_layout(*token_bt.shape)
        hidden_btd, cache = network.extend(
            token_bt, position_bt, placement, layout, cache
        )
        logits_bv = jnp.einsum(
            "bd,vd->bv",
            hidden_btd[:, -1],
            network.head(),
            preferred_element_type=jnp.float32,
        )
        is_id_v = jnp.arange(logits_bv.shape[1]) < num_ids
        position_b = position_bt[:, -1] + 1
        logits_bv = jnp.where(is_id_v, logits_bv, -jnp.inf)
        return choose(logits_bv, position_b, how), position_b, cache

    def prefill(params, bias, placement, token_bt, position_bt, how, capacity):
        cache = Cache.empty(cfg.model, token_bt.shape[0], capacity)
        return extend(params, bias, placement, token_bt, position_bt, how, cache)

    def step(params, bias, placement, token_b, position_b, how, cache):
        rows = token_b[:, None], position_b[:, None]
        return extend(params, bias, placement, *rows, how, cache)

    whole = sharding(run.mesh)
    outs = whole, whole, Cache.shardings(run.mesh)
    return (
        jax.jit(prefill, static_argnums=6, out_shardings=outs),
        jax.jit(step, donate_argnums=6, out_shardings=outs),
    )


def _rows(decoder: Decoder, prompts: Sequence[np.ndarray]):
    """Return tokens and positions [b, t]; b is a multiple of the batch's shards, with
    copies of the last prompt."""
    shards = decoder.cfg.mesh.num_batch_shards
    width = _up(max(map(len, prompts)), PROMPT_MULTIPLE)
    shape = (_up(len(prompts), shards), width)
    token_bt = np.full(shape, decoder.separator, np.int32)
    position_bt = np.full(shape, -1, np.int32)
    for row in range(shape[0]):
        prompt = prompts[min(row, len(prompts) - 1)]
        first = width - len(prompt)
        token_bt[row, first:] = prompt
        position_bt[row, first:] = np.arange(len(prompt))
    return token_bt, position_bt


def _when_used(where: jax.sharding.NamedSharding) -> jax.sharding.NamedSharding:
    """Return the sharding over experts alone: what is over all of FSDP is whole."""
    dims = [None if dim == FSDP_AXES else dim for dim in where.spec]
    return sharding(where.mesh, *dims)


def _as_arrays(how: Sampling) -> Sampling:
    return Sampling(
        np.float32(how.temperature), np.float32(how.top_p), np.uint32(how.seed)
    )


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
