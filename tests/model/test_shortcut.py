"""Test that no exchange of a shortcut-connected layer depends on attention."""

import dataclasses

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

from moejax.config import Config, Data, Dispatch, Model, Moe, Train
from moejax.plan.layout import Topology
from tests.support.plain_model import network

SMALL = Config(
    mesh=Topology(data=2, expert=2),
    model=Model(
        vocab_size=32, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=8, d_ff=24, remat="dispatch",
    ),
    moe=Moe(num_experts=4, top_k=2, d_expert=8, num_shared_experts=1),
    dispatch=Dispatch(buffer_factor=0.4),
    data=Data(seq_len=4),
    train=Train(batch_size=8, loss_chunk=4),
)  # fmt: skip
"""Configuration with buffers so small that later rounds run."""


def test_no_exchange_depends_on_attention():
    """In a shortcut layer no exchange depends on attention; in a standard layer each
    does, in both directions and in later rounds too."""
    by_block = {}
    for block in ("standard", "shortcut"):
        model = dataclasses.replace(SMALL.model, block=block)
        cfg = dataclasses.replace(SMALL, model=model)
        by_block[block] = exchanges(scan_body(cfg))
    after, before = by_block["standard"], by_block["shortcut"]
    assert after == ["after"] * len(after)
    assert before == ["before"] * len(after)
    assert len(after) >= 4


def scan_body(cfg: Config):
    """Return the jaxpr of the layer that the model's scan over MoE layers repeats."""
    ours, tokens_bt = network(cfg), np.zeros((8, 4), np.int32)
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
