"""Loads of experts, and slots that hold their replicas."""

import numpy as np

RING = 64


def zipf(rng, num_experts: int, total: int, exponent: float) -> np.ndarray:
    chance_e = np.arange(1.0, num_experts + 1) ** -exponent
    return rng.multinomial(total, rng.permutation(chance_e / chance_e.sum()))


def scattered(rng, num_experts: int, w: int, slots: int) -> np.ndarray:
    """Return slots of w devices: replicas anywhere, side by side too, some empty."""
    rest = rng.integers(-1, num_experts, w * slots - num_experts)
    return rng.permutation(np.r_[np.arange(num_experts), rest]).astype(np.int32)


def replicated(rng, num_experts: int, w: int, replicas: int) -> np.ndarray:
    """Return slots with `replicas` of each expert at random; two may share a device."""
    rounds = [rng.permutation(num_experts) for _ in range(replicas)]
    return np.concatenate(rounds).reshape(replicas, w, -1).swapaxes(0, 1).reshape(-1)


def ring() -> tuple:
    """Return loads, slots and devices with expert e on devices e and e + 1. The loads
    are a wave of 5 %: rows must travel far."""
    device = np.arange(RING)
    load_e = np.rint(4096 * (1 + 0.05 * np.sin(2 * np.pi * device / RING))).astype(int)
    row_ws = np.stack([device, (device - 1) % RING], axis=1)
    return load_e, row_ws.reshape(-1).astype(np.int32), RING
