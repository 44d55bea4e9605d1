"""Detection of Hopper GPUs, and the choice of their kernels."""

import re
from typing import Any

import jax

from moejax.choice import Choice

HOPPER_KINDS = re.compile(r"\b(H100|H200|H800|H20|GH200)\b")
"""Names of Hopper GPUs, for devices that do not state a compute capability."""
HOPPER = "9.0"
"""Compute capability of Hopper GPUs. Earlier and later GPUs do not have its WGMMA
instructions."""


def device_here() -> Any:
    """Return the device that programs are compiled for.

    It is the abstract device of the current mesh, if there is one, because a program
    can be lowered for a device that this machine does not have. Otherwise it is the
    first device of JAX.
    """
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0] if abstract is None else abstract


def is_hopper(device: Any) -> bool:
    """Return whether a JAX device, or an abstract device, is a Hopper GPU."""
    capability = getattr(device, "compute_capability", None)
    if capability is not None:
        return str(capability) == HOPPER
    return HOPPER_KINDS.search(device.device_kind) is not None


def why_not_hopper() -> str | None:
    """Return the reason why Hopper kernels cannot run on this device, or None if it is
    a Hopper GPU."""
    device = device_here()
    if is_hopper(device):
        return None
    return f"the kernels are for Hopper, not {device.device_kind}"


def hopper_or(other: str, declined: str | None) -> Choice[str]:
    """Return the choice 'hopper', or `other` if the Hopper kernels declined the arrays
    for the reason `declined`."""
    if declined:
        return Choice(other, f"the Hopper kernels decline: {declined}")
    return Choice("hopper", device_here().device_kind)
