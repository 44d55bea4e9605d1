"""A computation on the weights of all layers, one layer after the other."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from moejax.axes import devices_of
from moejax.kernels.device import device_here


def over_layers(body: Callable[[Any], Any], of_layers, mesh: Mesh) -> Any:
    """Return body(part) of the part of each layer, stacked, from arrays with a leading
    layer dim.

    If the devices of `mesh` are GPUs it is a loop, so that what one layer needs beside
    its result does not exist for all. On CPUs it is none: XLA stores a compiled program
    without the order between the collectives of a loop and those outside, and devices
    that run it from a compilation cache wait for one another forever (docs/testbed.md).
    """

    def layer(_, part):
        return None, body(part)

    with devices_of(mesh):
        unroll = device_here().platform == "cpu"
    return jax.lax.scan(layer, None, of_layers, unroll=unroll)[1]
