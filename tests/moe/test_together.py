"""The layer counts the tokens that choose both of two experts, each token once."""

import jax
import numpy as np
import pytest

from moejax.moe import route
from moejax.moe.types import RoutingStats
from tests.support.chosen import count_together
from tests.support.layers import (
    EXPERTS,
    MERGED,
    MESHES,
    cut,
    home,
    layer_layout,
    layer_of,
    make_layer,
    on_mesh,
    operands,
)

COUNTED = {"counts_together": True}


def layer_cases():
    """Return functions that make layers on two axes of devices, in halves, and with a
    tensor axis, whose devices share the tokens out."""

    def rows(topology, axes=("expert",), **changes):
        layout = layer_layout(topology, "owned", axes, **COUNTED, **changes)
        return lambda: make_layer(topology, layout)

    def scheduled(*args):
        return lambda: layer_of(cut(*args), **COUNTED)

    return {
        "halves": rows(MESHES["data2_expert4"], MERGED, halves=True),
        "s1h, sequences cut": scheduled(4, 2, 2, "s1h"),
        "s2": scheduled(2, 2, 4, "s2"),
    }


@pytest.mark.parametrize("name", layer_cases())
def test_pairs_are_counted_by_definition(name):
    layer = layer_cases()[name]()
    x_btd, choice_btk = operands(layer.batch, "zipf")
    args = on_mesh(layer, home(layer), (x_btd, choice_btk))
    _, sums = jax.device_get(layer.forward(*args))
    found_ee = sums.over_devices(np.sum).together_ee
    assert sums.together_ee.dtype == np.int32
    by_token_nk = choice_btk.reshape(-1, choice_btk.shape[-1])
    assert np.array_equal(found_ee, count_together(by_token_nk, EXPERTS))


def test_unused_choices_and_a_product_in_few_bits_count_alike():
    """Where a choice is -1 it counts nowhere."""
    rng = np.random.default_rng(0)
    choice_nk = np.argsort(rng.random((300, EXPERTS)), axis=1)[:, :4].astype(np.int32)
    choice_nk[rng.random(choice_nk.shape) < 0.3] = -1
    found_ee = jax.jit(route.count_together, static_argnums=1)(choice_nk, EXPERTS)
    assert np.array_equal(found_ee, count_together(choice_nk, EXPERTS))
    loads_e = route.count(choice_nk, EXPERTS)
    assert np.array_equal(np.diagonal(found_ee), loads_e)


def test_layers_that_need_no_pairs_count_none():
    layout = layer_layout(MESHES["expert8"], "owned")
    layer = make_layer(MESHES["expert8"], layout)
    args = on_mesh(layer, home(layer), operands(layer.batch, "zipf"))
    _, sums = jax.eval_shape(layer.forward.__wrapped__, *args)
    assert sums.together_ee is None
    stacked = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), sums)
    assert RoutingStats.from_sums(stacked).together_lee is None
