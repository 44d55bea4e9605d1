"""Which slots a split may set at the same time, in NumPy.

Water-filling (moejax.kernels.water_fill) visits experts one color after the other, and
all experts of a color at once: no two of them share a device. An expert on one device
alone leaves no choice and has no color.

    device            0        1        2
    slot p          0   1    2   3    4   5
    expert          0   1    0   2    1   2
    color          0   1    0   2    1   2     (each two of the experts share a device)
"""

import numpy as np

NONE = -1


def edge_coloring(row_p: np.ndarray, num_devices: int) -> np.ndarray:
    """Color of each slot, int32 [p]: equal for the slots of one expert, and in one
    color no device twice. -1: an empty slot, an expert on one device alone, and all
    but the first of an expert's slots on the same device.

    Greedy, the experts with most devices first: where all have at most r, and a device
    s slots, no more than r * (s - 1) + 1 colors.
    """
    slots_per_device = len(row_p) // num_devices
    devices_of, first_p = {}, []
    for slot, expert in enumerate(row_p.tolist()):
        device = slot // slots_per_device
        if expert >= 0 and device not in devices_of.setdefault(expert, []):
            devices_of[expert].append(device)
            first_p.append(slot)
    color_of, used_w = {}, [0] * num_devices  # bit c: the device has color c
    for expert in sorted(devices_of, key=lambda e: (-len(devices_of[e]), e)):
        if len(devices_of[expert]) == 1:
            continue
        used = 0
        for device in devices_of[expert]:
            used |= used_w[device]
        free = ~used & (used + 1)
        color_of[expert] = free.bit_length() - 1
        for device in devices_of[expert]:
            used_w[device] |= free
    color_p = np.full(len(row_p), NONE, np.int32)
    for slot in first_p:
        color_p[slot] = color_of.get(int(row_p[slot]), NONE)
    return color_p


def max_colors(num_experts: int, num_slots: int) -> int:
    """Of any plan: each expert with a second replica takes one of the spare slots."""
    return max(1, min(num_experts, num_slots - num_experts))
