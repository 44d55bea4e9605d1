"""Test shortcut-connected layers: they equal their formula, and no exchange depends on
attention."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

from moejax.config import Config, Dispatch
from moejax.model.flops import flops_per_token, num_params
from moejax.plan.layout import Topology
from tests.support import plain_model
from tests.support.close import assert_close
from tests.support.decoding import CFG, LENGTHS, one_by_one, tokens
from tests.support.plain_model import network
from tests.support.primitives import dot_flops

B, T = tokens().shape[0], 4
QUICK = {"xla_backend_optimization_level": 0}  # compiled in half the time
SHORTCUT = dataclasses.replace(
    CFG,
    model=dataclasses.replace(
        CFG.model, block="shortcut", num_layers=4, first_k_dense=0, remat="dispatch"
    ),
)
"""A model of two cycles, each of a dense and an MoE layer."""
ON_MESH = dataclasses.replace(
    SHORTCUT,
    mesh=Topology(data=2, expert=2),
    dispatch=Dispatch(rows_per_peer=3),
)
"""Configuration on a mesh, with buffers so small that later rounds run."""
LAYERS = dataclasses.replace(
    SHORTCUT,
    mesh=Topology(expert=2),
    model=dataclasses.replace(SHORTCUT.model, num_layers=2, moe_every=1, remat="none"),
    dispatch=Dispatch(rows_per_peer=B * T * 2),
)
"""A model of two MoE layers without dense layers."""


def plain_logits(cfg: Config, params: dict, tokens_bt):
    """Return logits computed layer by layer: h = x + attention(norm(x)), and the output
    is h + shared(norm(h)) + moe(norm(x))."""
    model, position_bt = cfg.model, plain_model.one_document(tokens_bt)
    x_btd = params["embed_vd"][tokens_bt]
    for layer in range(model.num_layers):
        block, kind = plain_model._find_block(cfg, params, layer)
        input_btd = x_btd
        args = (
            block["attention"],
            plain_model.norm(x_btd, block["attention_norm"], model),
        )
        x_btd = x_btd + plain_model.attention(cfg, *args, position_bt)
        dense_btd = plain_model.norm(x_btd, block["ff_norm"], model)
        x_btd = x_btd + plain_model.swiglu(block["dense"], dense_btd)
        assert ("routed_norm" in block) == kind.is_moe
        if kind.is_moe:
            routed_btd = plain_model.norm(input_btd, block["routed_norm"], model)
            x_btd = x_btd + plain_model.moe(cfg, block["moe"], routed_btd)
    return plain_model.norm(x_btd, params["norm"], model) @ params["embed_vd"].T


@pytest.mark.long
@pytest.mark.parametrize(
    "cfg", [LAYERS, pytest.param(ON_MESH, marks=pytest.mark.long)], ids=["two", "mixed"]
)
@pytest.mark.slow
def test_equals_its_formula(cfg):
    """Values and every gradient equal the formula.

    The first case scans two MoE layers on a mesh. The second has dense layers between,
    several rounds, and recomputation in the backward pass.
    """
    ours, tokens_bt = network(cfg), tokens()[:, :T]
    pull_btv = np.cos(np.arange(B * T * 32, dtype=np.float32)).reshape(B, T, 32)

    def scanned(params):
        hidden_btd, _, head_vd = ours.apply(params, tokens_bt)
        logits_btv = hidden_btd @ head_vd.T
        return jnp.vdot(pull_btv, logits_btv), logits_btv

    def plain(params):
        logits_btv = plain_logits(cfg, params, tokens_bt)
        return jnp.vdot(pull_btv, logits_btv), logits_btv

    actual, expected = (
        jax.device_get(jax.jit(f, compiler_options=QUICK)(ours.params))
        for f in (jax.value_and_grad(f, has_aux=True) for f in (scanned, plain))
    )
    reason = "four layers, each summed in another order"
    assert_close(actual[0][1], expected[0][1], factor=3, reason=reason)
    assert_close(actual[1], expected[1], factor=20, reason=reason)
    moe_block = expected[1]["cycles"]["blocks"][cfg.model.moe_every - 1]
    assert np.abs(moe_block["routed_norm"]["scale_d"]).max() > 1e-3


@pytest.mark.slow
def test_one_token_at_a_time_with_a_cache():
    """Decoding with a cache gives the hidden states of one pass over all tokens; the
    router's input is not in the cache."""
    cfg = dataclasses.replace(LAYERS, mesh=Topology())
    whole_btd = network(cfg).jit(network(cfg).params, tokens())[0]
    row_b = np.arange(B)
    cached_bsd = one_by_one(cfg)
    for step in range(cached_bsd.shape[1]):
        last_b = LENGTHS - 1 + step
        assert_close(
            cached_bsd[:, step], whole_btd[row_b, last_b],
            factor=3, reason="two layers, each summed in another order",
        )  # fmt: skip


def test_no_exchange_depends_on_attention():
    """In a shortcut layer no exchange depends on attention; in a standard layer each
    does, in both directions and in later rounds too."""
    by_block = {}
    for block in ("standard", "shortcut"):
        model = dataclasses.replace(ON_MESH.model, block=block, moe_every=1)
        cfg = dataclasses.replace(ON_MESH, model=model)
        by_block[block] = exchanges(scan_body(cfg))
    after, before = by_block["standard"], by_block["shortcut"]
    assert after == ["after"] * len(after)
    assert before == ["before"] * len(after)
    assert len(after) >= 4


def scan_body(cfg: Config):
    """Return the jaxpr of the layer that the model's scan over MoE layers repeats."""
    ours, tokens_bt = network(cfg), tokens()[:, :T]
    jaxpr = jax.make_jaxpr(ours.apply)(ours.params, tokens_bt).jaxpr
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    return scans[-1].params["jaxpr"].jaxpr


def exchanges(body) -> list[str]:
    """Return for each all_to_all of a layer, in program order, 'after' if its input
    depends on results of attention and 'before' otherwise."""
    order: list[str] = []

    def walk(jaxpr, tainted: set, all_inside: bool):
        """Return for each output whether it depends on attention."""
        for eqn in jaxpr.eqns:
            inputs = [v for v in eqn.invars if not isinstance(v, Literal)]
            is_tainted = all_inside or any(v in tainted for v in inputs)
            is_attention = "attention" in str(eqn.source_info.name_stack)
            if eqn.primitive.name == "all_to_all":
                order.append("after" if is_tainted else "before")
            outputs = [is_tainted or is_attention] * len(eqn.outvars)
            for inner in jaxprs_in_params(eqn.params):
                body = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
                if len(body.invars) != len(eqn.invars):
                    walk(body, set(), is_tainted)
                    continue
                pairs = zip(body.invars, eqn.invars)
                tainted_inputs = {
                    i for i, o in pairs if not isinstance(o, Literal) and o in tainted
                }
                inner_outputs = walk(body, tainted_inputs, all_inside)
                if len(inner_outputs) == len(outputs) and not is_attention:
                    outputs = inner_outputs
            tainted |= {v for v, is_one in zip(eqn.outvars, outputs) if is_one}
        return [not isinstance(v, Literal) and v in tainted for v in jaxpr.outvars]

    walk(body, set(), False)
    return order


def test_flops_and_parameters():
    cfg, params = SHORTCUT, network(SHORTCUT).params
    leaves = jax.tree.leaves(params)
    assert num_params(cfg.network)["total"] == sum(leaf.size for leaf in leaves)
    tokens_bt = np.zeros((B, cfg.data.seq_len), np.int32)
    flops = dot_flops(lambda params: plain_logits(cfg, params, tokens_bt), params)
    assert flops_per_token(cfg.network).forward * tokens_bt.size == flops
