"""Build loads of experts, and slots that hold their replicas."""

import numpy as np

RING = 64


def zipf(rng, num_experts: int, total: int, exponent: float) -> np.ndarray:
    """Return loads that are drawn under Zipf's law, experts in random order; they sum
    to `total`."""
    chance_e = np.arange(1.0, num_experts + 1) ** -exponent
    return rng.multinomial(total, rng.permutation(chance_e / chance_e.sum()))


def scattered(rng, num_experts: int, w: int, slots: int) -> np.ndarray:
    """Return the slots of w devices with each expert at least once, in random order.

    Two replicas may share a device, and slots may be empty.
    """
    rest = rng.integers(-1, num_experts, w * slots - num_experts)
    return rng.permutation(np.r_[np.arange(num_experts), rest]).astype(np.int32)


def replicated(rng, num_experts: int, w: int, replicas: int) -> np.ndarray:
    """Return slots with `replicas` of each expert at random; two may share a device."""
    rounds = [rng.permutation(num_experts) for _ in range(replicas)]
    return np.concatenate(rounds).reshape(replicas, w, -1).swapaxes(0, 1).reshape(-1)


def ring() -> tuple:
    """Return loads, slots and the number of devices of a ring: expert e has replicas on
    devices e and e + 1.

    The loads are a sine wave of 5 %, so that rows must move along many devices to be
    even.
    """
    device = np.arange(RING)
    load_e = np.rint(4096 * (1 + 0.05 * np.sin(2 * np.pi * device / RING))).astype(int)
    row_ws = np.stack([device, (device - 1) % RING], axis=1)
    return load_e, row_ws.reshape(-1).astype(np.int32), RING
