"""Configuration of a run: frozen dataclasses that check their own fields.

gin files bind these names (`Moe.top_k = 2`), and a `Config` holds one of each. A rule
within one class is checked when an object of it is made; a rule between two classes is
checked when the `Config` is made. This package imports the standard library and
moejax.plan alone.

    Mesh                            devices (moejax.plan.layout.Topology)
    Model, Attention, Rope, Mla, Moe, Router
                                    the network: the parameters of a checkpoint
    Dispatch                        how the experts are computed
    Recorded                        loads that replace a router's choices
    Optimizer, Data, Train          how the network is trained
    Balance                         when experts move and are replicated
    Processes, Checkpoint           several processes, and recovery from failures
"""

from moejax.config.attention import Attention, LayerAttention, Mla, Rope
from moejax.config.config import Config
from moejax.config.dispatch import Dispatch, Points, Recorded
from moejax.config.network import LayerKind, Model, Moe, Network, Router
from moejax.config.training import (
    Balance,
    Checkpoint,
    Data,
    Optimizer,
    Processes,
    Train,
)

__all__ = [
    "Attention", "Balance", "Checkpoint", "Config", "Data", "Dispatch",
    "LayerAttention", "LayerKind", "Mla", "Model", "Moe", "Network", "Optimizer",
    "Points", "Processes", "Recorded", "Rope", "Router", "Train",
]  # fmt: skip
