"""Guard of transport='ragged', which today's GPUs run slowly or wrongly.

What others have measured of lax.ragged_all_to_all on GPUs:

    openxla/xla 33386    2 % of the links' rate between 8 B200 of one host
    marin 7012           steps of an MoE on 8 B200 in 15.6 s, and in 3.9 s by a ring
    marin 7891           between 64 devices, a loop of single sends after a wait for the
                         host: 56 % of the step
    marin 8077           wrong gradients together with XLA's latency-hiding scheduler,
                         right ones without it
    openxla/xla 47283    illegal addresses in groups of more than 32 devices

So a run that asks for it on GPUs is told so, is refused where results are known to be
wrong, and has it checked at each start (train/doctor).
"""

import os
from collections.abc import Mapping

import jax

from moejax.axes import axis_size
from moejax.moe.mesh_roles import MeshLayout
from train.step.gpu_options import LATENCY_HIDING, value_of

MAX_RANKS = 32
"""Largest number of devices of a group between which XLA's ragged exchange runs."""
OPTIMIZED = ("O1", "O2", "O3")
"""Values of jax_optimization_level with which XLA hides latencies without the flag."""


def check_ragged(
    mesh_layout: MeshLayout, platform: str, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """Return lines that warn of the ragged transport; none for other transports.

    Raises ValueError where it is known to go wrong on devices of a platform: together
    with the latency-hiding scheduler, or between more than MAX_RANKS devices.
    """
    if mesh_layout.layout.transport != "ragged" or platform != "gpu":
        return []
    ranks = axis_size(mesh_layout.mesh, mesh_layout.peer_axes)
    if ranks > MAX_RANKS:
        raise ValueError(
            f"Dispatch.transport='ragged' crashes between more than {MAX_RANKS} GPUs "
            f"(openxla/xla 47283), and the group has {ranks}: use Dispatch.transport = "
            "'padded', or a group of fewer devices"
        )
    if hides_latency(environ):
        raise ValueError(
            "Dispatch.transport='ragged' gives wrong gradients with XLA's "
            "latency-hiding scheduler (marin 8077), which is on: use "
            "Dispatch.transport = 'padded', or set "
            f"XLA_FLAGS=--{LATENCY_HIDING}=false and leave jax_optimization_level unset"
        )
    return [
        "RAGGED TRANSPORT: others measured 2 % of the links' rate between 8 GPUs of a "
        "host (openxla/xla 33386), and steps four times as long (marin 7012); it also "
        "gave wrong gradients (marin 8077)",
        "RAGGED TRANSPORT: so it is checked at each start of a run; "
        "Dispatch.transport = 'padded' is the default",
    ]


def hides_latency(environ: Mapping[str, str]) -> bool:
    """Return whether steps on GPUs are compiled with the latency-hiding scheduler, by
    XLA_FLAGS, the options of gpu_options.py or jax's optimization level."""
    value = value_of(LATENCY_HIDING, environ)
    is_on = str(value).lower() not in ("false", "0")
    return is_on or jax.config.jax_optimization_level in OPTIMIZED
