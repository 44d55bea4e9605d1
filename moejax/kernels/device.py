"""Which device is here, and whether kernels for Hopper GPUs can run on it."""

import re
from typing import Any, NamedTuple

import jax

HOPPER_KINDS = re.compile(r"\b(H100|H200|H800|H20|GH200)\b")
HOPPER = "9.0"
"""Compute capability; its WGMMA is of no earlier and no later device."""


class KernelChoice(NamedTuple):
    """The implementation that a kernel's room chose, for a line at start-up."""

    implementation: str
    why: str
    """One clause."""


def device_here() -> Any:
    """Return the abstract device of this context, if there is one: a program can be
    lowered for a device that is not here. Else return the first device."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0] if abstract is None else abstract


def is_hopper(device: Any) -> bool:
    capability = getattr(device, "compute_capability", None)
    if capability is not None:
        return str(capability) == HOPPER
    return HOPPER_KINDS.search(device.device_kind) is not None


def why_not_hopper() -> str | None:
    """Return why Hopper kernels cannot run here, or None on a Hopper GPU."""
    device = device_here()
    if is_hopper(device):
        return None
    return f"the kernels are for Hopper, not {device.device_kind}"


def hopper_or(other: str, declined: str | None) -> KernelChoice:
    """Return 'hopper', or `other` where its kernels declined the arrays."""
    if declined:
        return KernelChoice(other, f"the Hopper kernels decline: {declined}")
    return KernelChoice("hopper", device_here().device_kind)
