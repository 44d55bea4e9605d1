"""FLOPs of dense training, in which every expert computes every token.
test_equals_reference.py compares the layer with the reference, and test_route_losses.py
the mutual-information loss, which makes few experts enough for evaluation."""

import dataclasses

from moejax.config import Router
from moejax.model.flops import flops_per_token, num_params
from moejax.plan.layout import Topology
from tests.support.layers import (
    BATCH,
    EXPERTS,
    SEQ,
    TOP_K,
    WIDTH,
    config,
    home,
    layer_of,
    on_mesh,
    operands,
)
from tests.support.primitives import dot_flops

CFG = config(Topology(), router=Router(training="dense"))


def test_flops_of_training_are_those_of_all_experts():
    """FLOPs count all experts; the parameters that serve a token count top_k
    experts."""
    layer = layer_of(CFG)
    args = on_mesh(layer, home(layer), operands(BATCH, None))
    flops, layers = flops_per_token(CFG.network), CFG.model.num_moe_layers
    of_layer = dot_flops(layer.forward.__wrapped__, *args)
    counted = CFG.model.d_model / WIDTH * layers * of_layer
    assert (flops.routed + flops.router) * BATCH * SEQ == counted
    sparse = dataclasses.replace(CFG, router=Router())
    assert flops.routed == EXPERTS / TOP_K * flops_per_token(sparse.network).routed
    assert num_params(CFG.network) == num_params(sparse.network)
