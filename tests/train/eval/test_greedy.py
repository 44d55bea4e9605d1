"""Greedy generation with a cache is the argmax of passes without one, for each kind of
attention, in float32."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from moejax.axes import make_mesh
from moejax.config import Attention, Config, Data, Mla, Model, Moe, Rope, Train
from moejax.plan.layout import Topology
from moejax.resolve.resolved import resolve
from tests.support.plain_model import network
from train.checkpoint.load import LoadedModel
from train.eval.decoding import Sampling, decode, make_decoder
from train.step.compiled import home_placement
from train.step.state import abstract_state

NUM_TOKENS = 26
LENGTHS = (3, 7, 18, 1)
"""Tokens of the prompts. Texts grow over several windows and chunks."""
SEQ_LEN, VOCAB = 48, 48
CFG = Config(
    model=Model(
        vocab_size=VOCAB, d_model=32, num_layers=3, num_heads=4, num_kv_heads=2,
        head_dim=8, d_ff=48, rope_theta=100.0, tie_embeddings=False,
        compute_dtype="float32",
    ),
    moe=Moe(num_experts=4, top_k=2, d_expert=16),
    data=Data(seq_len=SEQ_LEN),
    train=Train(batch_size=len(LENGTHS), loss_chunk=SEQ_LEN),
)  # fmt: skip
LATENT = Mla(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
YARN = Rope(
    scaling="yarn", factor=8.0, original_max_position_embeddings=16, mscale=1.0,
    mscale_all_dim=0.5,
)  # fmt: skip
WINDOW, CHUNK = {"sliding_window": 8}, {"chunk_size": 16}
NOPE = {"temperature_scale": 1.0, "temperature_floor": 8}
ALL_KINDS = Attention(
    layers=("nope", "chunked", "sliding"), **WINDOW, **CHUNK, **NOPE,
    bias="all", sinks=True,
)  # fmt: skip
KINDS = {
    "all kinds, sinks, half rotated": {
        "attention": ALL_KINDS, "rope": Rope(partial_rotary_factor=0.5),
    },
    "latent queries, YaRN": {
        "mla": dataclasses.replace(LATENT, q_lora_rank=10), "rope": YARN,
    },
    "chunked, l2 norm": {
        "attention": Attention(layers=("chunked",), **CHUNK, l2_norm=True, scale=4.0),
        "rope": Rope(
            scaling="llama3", factor=8.0, original_max_position_embeddings=16
        ),
    },
    "nope": {"attention": Attention(layers=("nope", "nope", "full"), **NOPE)},
    "clipped": {"attention": Attention(clip_qkv=3.0, scale=0.7, bias="qkv")},
    "latent of all kinds": {
        "mla": LATENT,
        "attention": dataclasses.replace(ALL_KINDS, bias="none", sinks=False),
    },
}  # fmt: skip
"""Parts of the configuration that differ from CFG."""
LOUD = ("q_dhi", "q_b_rhi", "out_hid", "out_hjd")


def configure(name: str, mesh: Topology) -> Config:
    """Return the configuration of a kind of attention."""
    parts, model = KINDS[name], CFG.model
    if "mla" in parts:
        model = dataclasses.replace(model, num_kv_heads=model.num_heads)
    if "attention" in parts and parts["attention"].layers == ALL_KINDS.layers:
        one_moe = ("dense", "dense", "moe")  # compiled in half the time
        model = dataclasses.replace(model, layers=one_moe)
    return dataclasses.replace(CFG, model=model, mesh=mesh, **parts)


def make_params(cfg: Config) -> dict:
    """Return random parameters in which attention is sharp and has most of the say, so
    that texts are not dull."""

    def louder(path, leaf):
        return 8 * leaf if path[-1].key in LOUD else leaf

    return jax.tree_util.tree_map_with_path(louder, network(cfg).params)


def generate(cfg: Config, params, prompts) -> np.ndarray:
    """Return the tokens that follow the prompts, [b, t]."""
    mesh = make_mesh(cfg.mesh, jax.devices()[: cfg.mesh.num_devices])
    run, bias = resolve(cfg, mesh), network(cfg).bias
    state = abstract_state(run, optax.identity())
    params, bias = (
        jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), *pair)
        for pair in ((params, state.params), (bias, state.router_bias))
    )
    loaded = LoadedModel(run, params, bias, home_placement(run), 0, {})
    tokens = decode(make_decoder(loaded, VOCAB, 0), prompts, NUM_TOKENS, Sampling())
    return np.stack(list(tokens), axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("all kinds, sinks, half rotated", Topology()),
        ("latent queries, YaRN", Topology(tensor=2)),
        *(
            pytest.param(n, Topology(expert=2), marks=pytest.mark.long)
            for n in list(KINDS)[2:]
        ),
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_full_passes(name, mesh):
    """A pass over each whole text has, behind every token from the end of the prompt
    on, the next token as its likeliest one. Prompts of several lengths are one
    batch."""
    rng, alone = np.random.default_rng(0), configure(name, Topology())
    prompts = [rng.integers(0, VOCAB, length).astype(np.int32) for length in LENGTHS]
    params = make_params(alone)
    generated_bt = generate(configure(name, mesh), params, prompts)
    assert generated_bt.shape == (len(LENGTHS), NUM_TOKENS)
    assert min(len(set(row)) for row in generated_bt.tolist()) > 3, "no dull texts"
    token_bt = np.zeros((len(LENGTHS), SEQ_LEN), np.int32)
    for row, (prompt, own) in enumerate(zip(prompts, generated_bt)):
        text = np.concatenate([prompt, own])
        token_bt[row, : len(text)] = text
    hidden_btd, _, head_vd = network(alone).jit(params, token_bt)
    likeliest_bt = np.argmax(np.asarray(hidden_btd) @ np.asarray(head_vd).T, axis=-1)
    for row, length in enumerate(LENGTHS):
        behind = slice(length - 1, length - 1 + NUM_TOKENS)
        np.testing.assert_array_equal(generated_bt[row], likeliest_bt[row, behind])
