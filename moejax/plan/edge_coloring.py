"""Edge coloring of experts, in NumPy: experts of one color share no device.

Water-filling (moejax.kernels.water_fill) visits the colors one after the other and all
experts of a color at once, which is safe because no two of them share a device. An
expert on only one device leaves nothing to choose and has no color.

    device            0        1        2
    slot p          0   1    2   3    4   5
    expert          0   1    0   2    1   2
    color           0   1    0   2    1   2      every two experts share a device
"""

import numpy as np

NONE = -1
"""Color of a slot that has none."""


def edge_coloring(row_p: np.ndarray, num_devices: int) -> np.ndarray:
    """Return the color of each slot, int32 [p], from the expert of each slot, `row_p`.

    The slots of one expert have the same color, and no device has two slots of one
    color. The color is -1 for an empty slot, for an expert on only one device, and for
    all but the first of an expert's slots on the same device.

    The coloring is greedy and takes the experts with most devices first. If every
    expert is on at most r devices and a device has s slots, it uses at most
    r * (s - 1) + 1 colors.
    """
    slots_per_device = len(row_p) // num_devices
    devices, first_slots = {}, []
    for slot, expert in enumerate(row_p.tolist()):
        device = slot // slots_per_device
        if expert >= 0 and device not in devices.setdefault(expert, []):
            devices[expert].append(device)
            first_slots.append(slot)
    colors, used_w = {}, [0] * num_devices  # bit c of used_w: the device has color c
    for expert in sorted(devices, key=lambda e: (-len(devices[e]), e)):
        if len(devices[expert]) == 1:
            continue
        used = 0
        for device in devices[expert]:
            used |= used_w[device]
        free = ~used & (used + 1)  # the lowest bit that no device uses
        colors[expert] = free.bit_length() - 1
        for device in devices[expert]:
            used_w[device] |= free
    color_p = np.full(len(row_p), NONE, np.int32)
    for slot in first_slots:
        color_p[slot] = colors.get(int(row_p[slot]), NONE)
    return color_p


def max_colors(num_experts: int, num_slots: int) -> int:
    """Return the maximum number of colors of any plan with these sizes, at least 1.

    Only experts with two replicas or more have a color, and each of these takes one of
    the num_slots - num_experts spare slots.
    """
    return max(1, min(num_experts, num_slots - num_experts))
