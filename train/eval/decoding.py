"""Generate text: prefill the prompts, then run one jitted step for each token.

prompt 0   # t h e   c a t     # is a separator at position -1
prompt 1   # # # # a   d o

The separators fill the rows up on the left, so that all rows end together. They form a
document of their own, to which the prompt does not attend.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jaxtyping import Array, Float, Int

from moejax.axes import BATCH_AXES, FSDP_AXES, VOCAB_AXES, sharding
from moejax.config import Config
from moejax.model.cache import Cache
from moejax.resolve.resolved import Resolved
from train.checkpoint.load import LoadedModel
from train.step import expert_params
from train.step.state import model_graph

PROMPT_MULTIPLE = 32
CACHE_MULTIPLE = 128
"""Widths are rounded up to multiples of these, so that most prompts share a program."""


MIN_TEMPERATURE = 1e-30
"""Lower temperatures draw as this one does. XLA takes those below 1e-38 for 0."""


@struct.dataclass
class Sampling:
    """Sampling settings. They are array values, so changing them compiles nothing."""

    temperature: Float[Array, ""] | float = 0.0
    """Temperature of the softmax; 0 takes the likeliest token."""
    top_p: Float[Array, ""] | float = 1.0
    """Nucleus sampling: draw from the likeliest tokens whose probabilities add up to
    this (Holtzman et al. 2019, section 3.1). The likeliest token is always included."""
    seed: Int[Array, ""] | int = 0


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A loaded model, ready to continue prompts."""

    cfg: Config
    mesh: jax.sharding.Mesh
    weights: tuple
    """Parameters, router bias and placement, the first arguments of both programs."""
    separator: int
    prefill: Callable
    """Jitted function (*weights, token_bt, position_bt, sampling, capacity) ->
    (token_b, position_b, cache): the next tokens and their positions."""
    step: Callable
    """Jitted function (*weights, token_b, position_b, sampling, cache) -> the same
    results. The cache is donated."""


def make_decoder(loaded: LoadedModel, num_ids: int, separator: int) -> Decoder:
    """Return a decoder that generates text, by sampling among the first `num_ids` token
    ids.

    A model's vocabulary can be larger than its tokenizer's.
    """

    # Dense parameters are gathered here once. Both programs know them to be whole, so
    # that no step gathers one (model_graph).
    def gathered(leaf: jax.Array) -> jax.Array:
        """Return a parameter, split over the tensor axis at most."""
        rests = leaf.sharding
        dims = [None if dim in (FSDP_AXES, VOCAB_AXES) else dim for dim in rests.spec]
        return jax.device_put(leaf, sharding(rests.mesh, *dims))

    experts, dense = expert_params.take(loaded.params)
    params = expert_params.put(jax.tree.map(gathered, dense), experts)
    weights = params, loaded.router_bias, loaded.placement
    programs = _make_programs(loaded.run, num_ids)
    return Decoder(loaded.cfg, loaded.mesh, weights, separator, *programs)


def decode(
    decoder: Decoder, prompts: Sequence[np.ndarray], max_tokens: int, sampling: Sampling
) -> Iterator[np.ndarray]:
    """Yield the next token of every prompt, int32 [prompts], up to `max_tokens` times.

    A token depends only on the model, its own prompt, the tokens generated after that
    prompt, and `sampling`. The caller may stop iterating at any time. The device
    computes one step ahead of the tokens that are yielded. Raises ValueError where the
    logits of a prompt are not finite.
    """
    token_bt, position_bt = _pad_prompts(decoder, prompts)
    capacity = _round_up(token_bt.shape[1] + max_tokens, CACHE_MULTIPLE)
    batch_sharding, whole = sharding(decoder.mesh, BATCH_AXES), sharding(decoder.mesh)
    rows = jax.device_put((token_bt, position_bt), batch_sharding)
    numbers = Sampling(
        np.float32(sampling.temperature),
        np.float32(sampling.top_p),
        np.uint32(sampling.seed),
    )
    sampling = jax.device_put(numbers, whole)
    last = decoder.prefill(*decoder.weights, *rows, sampling, capacity)
    for num_left in reversed(range(max_tokens)):
        token_b, position_b, cache = last
        if num_left:
            last = decoder.step(*decoder.weights, token_b, position_b, sampling, cache)
        token_b = np.asarray(token_b)[: len(prompts)]
        if (token_b < 0).any():
            dtype = decoder.cfg.model.compute_dtype
            raise ValueError(
                f"the logits of prompt {int(np.argmin(token_b)) + 1} are not finite: "
                f"parameters are not numbers, or they overflow in {dtype}: take an "
                "earlier checkpoint (--step), or bind Model.compute_dtype = 'float32'"
            )
        yield token_b


def sample_tokens(
    logits_bv: Float[Array, "b v"], position_b: Int[Array, " b"], sampling: Sampling
) -> Int[Array, " b"]:
    """Sample one token for each row; -1 for a row whose largest logit is not finite.

    The noise depends only on the seed and the token's position, so neither on other
    rows nor on the mesh.
    """
    key = jax.random.key(sampling.seed)
    max_b1 = jnp.max(logits_bv, axis=-1, keepdims=True)

    def noise(position):
        return jax.random.gumbel(
            jax.random.fold_in(key, position), logits_bv.shape[1:], jnp.float32
        )

    # Differences to the largest logit, which stays 0 at any temperature, while the
    # others may overflow to -inf: the limit is the likeliest token.
    is_drawn = sampling.temperature > 0
    temperature = jnp.where(is_drawn, sampling.temperature, 1.0)
    scaled_bv = (logits_bv - max_b1) / jnp.maximum(temperature, MIN_TEMPERATURE)
    share_bv = jax.nn.softmax(scaled_bv, axis=-1)
    order_bv = jnp.argsort(-share_bv, axis=-1, stable=True)
    sorted_bv = jnp.take_along_axis(share_bv, order_bv, axis=-1)
    before_bv = jnp.cumsum(sorted_bv, axis=-1) - sorted_bv
    is_kept_bv = (before_bv < sampling.top_p).at[:, 0].set(True)
    # The argmax of logits plus Gumbel noise is a sample from their softmax.
    noisy_bv = jnp.take_along_axis(
        scaled_bv + jax.vmap(noise)(position_b), order_bv, axis=-1
    )
    rank_b = jnp.argmax(jnp.where(is_kept_bv, noisy_bv, -jnp.inf), axis=-1)
    sampled_b = jnp.take_along_axis(order_bv, rank_b[:, None], axis=-1)[:, 0]
    likeliest_b = jnp.argmax(logits_bv, axis=-1)
    token_b = jnp.where(is_drawn, sampled_b, likeliest_b).astype(jnp.int32)
    return jnp.where(jnp.isfinite(max_b1[:, 0]), token_b, -1)


def _make_programs(run: Resolved, num_ids: int):
    """Return the jitted prefill and step functions of a Decoder."""
    cfg, graph = run.cfg, model_graph(run, is_gathered=True)

    def extend(params, bias, placement, token_bt, position_bt, sampling, cache):
        network = nnx.merge(graph, params, bias)
        layout = run.exact_layout(*token_bt.shape)
        hidden_btd, cache = network.extend(
            token_bt, position_bt, placement, layout, cache
        )
        logits_bv = jnp.einsum(
            "bd,vd->bv",
            hidden_btd[:, -1],
            network.whole_head(),
            preferred_element_type=jnp.float32,
        )
        is_id_v = jnp.arange(logits_bv.shape[1]) < num_ids
        position_b = position_bt[:, -1] + 1
        logits_bv = jnp.where(is_id_v, logits_bv, -jnp.inf)
        return sample_tokens(logits_bv, position_b, sampling), position_b, cache

    def prefill(params, bias, placement, token_bt, position_bt, sampling, capacity):
        cache = Cache.empty(cfg.network, token_bt.shape[0], capacity)
        return extend(params, bias, placement, token_bt, position_bt, sampling, cache)

    def step(params, bias, placement, token_b, position_b, sampling, cache):
        rows = token_b[:, None], position_b[:, None]
        return extend(params, bias, placement, *rows, sampling, cache)

    whole = sharding(run.mesh)
    outs = whole, whole, Cache.shardings(cfg.network, run.mesh)
    return (
        jax.jit(prefill, static_argnums=6, out_shardings=outs),
        jax.jit(step, donate_argnums=6, out_shardings=outs),
    )


def _pad_prompts(decoder: Decoder, prompts: Sequence[np.ndarray]):
    """Return the prompts' tokens and positions, int32 [b, t] each.

    b is a multiple of the number of batch shards; copies of the last prompt fill it up.
    """
    shards = decoder.cfg.mesh.num_batch_shards
    width = _round_up(max(map(len, prompts)), PROMPT_MULTIPLE)
    shape = (_round_up(len(prompts), shards), width)
    token_bt = np.full(shape, decoder.separator, np.int32)
    position_bt = np.full(shape, -1, np.int32)
    for row in range(shape[0]):
        prompt = prompts[min(row, len(prompts) - 1)]
        first = width - len(prompt)
        token_bt[row, first:] = prompt
        position_bt[row, first:] = np.arange(len(prompt))
    return token_bt, position_bt


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
