"""Groups of devices that exchange rows, by the mesh axes that they span."""

from typing import Literal

Group = Literal["expert", "data_expert", "dc_expert"]
GROUP_AXES: dict[Group, tuple[str, ...]] = {
    "expert": ("expert",),
    "data_expert": ("data", "expert"),
    "dc_expert": ("dc", "expert"),
}
"""Mesh axes of each *group*. A group is a set of devices that exchange rows with each
other and among which the replicas of an expert are placed. Where a group spans two mesh
axes, the expert axis is the innermost."""

MAX_EXPERTS = 2**13
"""Largest number of experts of a layer."""


def group_name(axes: tuple[str, ...]) -> str:
    """Return the name of the group with these mesh axes, for error messages."""
    if len(axes) == 1:
        return f"the {axes[0]} axis"
    return f"the group {' x '.join(axes)}"


def uneven_group(num_experts: int, num_devices: int, axes: tuple[str, ...]) -> str:
    """Return an error message where `num_devices` does not divide `num_experts`, else
    the empty string: every device of a group must own the same number of experts."""
    if num_experts % num_devices == 0:
        return ""
    near = num_experts // num_devices * num_devices or num_devices
    fix = f"Mesh.{axes[0]}" if len(axes) == 1 else "Dispatch.group"
    values = [n for n in (near, near + num_devices) if n <= MAX_EXPERTS]
    advice = f"use {' or '.join(map(str, values))}, or another {fix}"
    if not values:
        mesh = " x ".join(f"Mesh.{axis}" for axis in axes)
        advice = f"use {mesh} = {num_experts} or a divisor of it"
    return (
        f"num_experts={num_experts} must be divisible by {group_name(axes)} "
        f"({num_devices}): {advice}"
    )
