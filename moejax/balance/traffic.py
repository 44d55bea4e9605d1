"""Where rows go under a plan, in NumPy: what the device's split does, for loads that
need not be whole numbers.

`load_we` is the load of one layer by source device w and expert e, of one group of the
expert axis (with several groups: their mean).
"""

import numpy as np

from moejax.layout import Split


def rows_by_slot(
    load_we: np.ndarray, row_p: np.ndarray, num_devices: int, split: Split = "even"
) -> np.ndarray:
    """Rows from each source device to each slot, float [w, p].

    even: each replica of an expert takes an equal share of every source's rows.
    local_first: a source that holds replicas shares its rows among those; the others
    share theirs among all replicas.
    """
    num_experts = load_we.shape[1]
    full_p = row_p >= 0
    expert_p = np.where(full_p, row_p, 0)
    replicas_e = np.bincount(row_p[full_p], minlength=num_experts)
    share_wp = np.tile(full_p / np.maximum(replicas_e, 1)[expert_p], (num_devices, 1))
    if split == "local_first":
        device_p = np.arange(len(row_p)) // (len(row_p) // num_devices)
        here_wp = (device_p == np.arange(num_devices)[:, None]) & full_p
        local_we = np.zeros((num_devices, num_experts))
        np.add.at(local_we, (device_p[full_p], row_p[full_p]), 1)
        local_wp = local_we[:, expert_p]
        share_wp = np.where(local_wp > 0, here_wp / np.maximum(local_wp, 1), share_wp)
    return load_we[:, expert_p] * share_wp


def pair_rows(rows_wp: np.ndarray) -> np.ndarray:
    """Rows from each source device to each device, [w, w]."""
    num_devices = len(rows_wp)
    return rows_wp.reshape(num_devices, num_devices, -1).sum(axis=-1)


def device_rows(rows_wp: np.ndarray) -> np.ndarray:
    """Rows that each device computes, [w]."""
    return pair_rows(rows_wp).sum(axis=0)


def max_over_mean(rows_w: np.ndarray) -> float:
    """1 is even; 1 too where there is no load at all."""
    mean = rows_w.mean()
    return float(rows_w.max() / mean) if mean > 0 else 1.0
