"""Loads as a run counts them, by device that splits the batch, as a balancer takes
them: by owner of a group."""

import numpy as np

from moejax.plan.layout import Layout, Topology


def by_owner(tokens_lwe: np.ndarray, mesh: Topology, layout: Layout) -> np.ndarray:
    """Choices of each expert by the owner that has the tokens, mean over groups.

    `tokens_lwe` counts devices over dc x data x expert. Where the owners of an expert
    are more than the devices that split the batch, the tensor axis among them, each of
    those has its part; where several devices share one owner's experts, their sum.
    """
    num_layers, _, num_experts = tokens_lwe.shape
    sizes = (mesh.dc, mesh.data, mesh.expert)
    load = tokens_lwe.reshape(num_layers, *sizes, num_experts)
    axes = ("dc", "data", "expert")
    outside = tuple(1 + i for i, axis in enumerate(axes) if axis not in layout.axes)
    load_lwe = load.mean(axis=outside).reshape(num_layers, -1, num_experts)
    w, sources = layout.num_devices, load_lwe.shape[1]
    if sources < w:
        return np.repeat(load_lwe, w // sources, axis=1) / (w // sources)
    return load_lwe.reshape(num_layers, w, -1, num_experts).sum(axis=2)
