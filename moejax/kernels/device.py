"""Which implementation of a kernel a device and a shape get, and why."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

HOPPER_KINDS = re.compile(r"\b(H100|H200|H800|H20|GH200)\b")
HOPPER = "9.0"
"""Compute capability; its WGMMA is of no earlier and no later device."""


class Choice(NamedTuple):
    implementation: str
    why: str
    """One clause, for a line at start-up."""


def device_here() -> Any:
    """The abstract device of this context, if there is one: a program can be lowered
    for a device that is not here. Else the first one."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0] if abstract is None else abstract


def is_hopper(device: Any) -> bool:
    capability = getattr(device, "compute_capability", None)
    if capability is not None:
        return str(capability) == HOPPER
    return HOPPER_KINDS.search(device.device_kind) is not None


def grouped_dot_here(
    dtype: jax.typing.DTypeLike, num_rows: int, *widths: int, is_fp8: bool = False
) -> Choice:
    """Choice of a grouped product of so many rows between arrays of these widths."""
    device = device_here()
    if not is_hopper(device):
        return Choice(
            "blocked", f"the kernels are for Hopper, not {device.device_kind}"
        )
    # Pallas takes half a second to import, and only this needs it.
    from moejax.kernels.grouped_dot.hopper.kernels import declines

    declined = declines(jnp.dtype(dtype), num_rows, *widths, is_fp8=is_fp8)
    return _hopper_or("blocked", device, declined)


def permute_here(dtype: jax.typing.DTypeLike, d: int) -> Choice:
    """Choice of gathers and weighted sums of rows of this width."""
    device = device_here()
    if not is_hopper(device):
        return Choice("xla", f"the kernels are for Hopper, not {device.device_kind}")
    from moejax.kernels.permute.hopper import declines

    return _hopper_or("xla", device, declines(jnp.dtype(dtype), d))


def _hopper_or(other: str, device: Any, declined: str | None) -> Choice:
    if declined:
        return Choice(other, f"the Hopper kernels decline: {declined}")
    return Choice("hopper", device.device_kind)
