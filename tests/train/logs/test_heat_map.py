"""Test the picture of the load of each expert."""

import numpy as np
import pytest

from train.logs.heat_map import COLORS, color, heat_map


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 16), (94, 128), (4, 2048)])
def test_cells_of_the_heat_map_are_layers_and_experts(shape):
    rng = np.random.default_rng(0)
    tokens_le = rng.integers(0, 100, shape)
    map_hwc = heat_map(tokens_le)
    side = map_hwc.shape[0] // shape[0]
    assert side >= 4
    assert map_hwc.shape == (side * shape[0], side * shape[1], 3)
    assert map_hwc.dtype == np.uint8
    for layer, expert in zip(*(rng.integers(0, size, 5) for size in shape)):
        ratio = tokens_le[layer, expert] / tokens_le[layer].mean()
        cell = map_hwc[layer * side :, expert * side :][:side, :side].reshape(-1, 3)
        assert len(np.unique(cell, axis=0)) == 1
        assert np.array_equal(cell[0], color(np.log2(max(ratio, 0.25))))


def test_even_is_neutral_and_colors_run_one_way():
    neutral = COLORS[len(COLORS) // 2]
    assert tuple(heat_map(np.full((1, 4), 7))[0, 0]) == neutral
    assert tuple(heat_map(np.zeros((1, 4)))[0, 0]) == neutral
    assert tuple(color(np.array(-9.0))) == COLORS[0]
    assert tuple(color(np.array(9.0))) == COLORS[-1]
    red, _, blue = np.moveaxis(color(np.linspace(-2, 2, 101)).astype(int), -1, 0)
    assert (np.diff(red[:51]) >= 0).all()
    assert (np.diff(blue[50:]) <= 0).all()
