"""LAER-MoE's planner (arXiv 2602.11686, ASPLOS'26): several numbers of replicas, each
placed greedily, and the plan with the best score.

    candidates   even replicas; replicas in proportion to load; a few shifts of one
                 replica away from the latter
    place        experts from the most rows per replica down, each replica on the node
                 with the fewest copies of it, there on the device with the fewest rows
    score        4 sum_i comm_i + (3 + ckpt) max_g comp_g, in seconds

Its experts are sharded over all devices, and every device fetches what its slots hold
a layer ahead, so that another plan costs nothing (store 'sharded', prefetched).
"""

import heapq
import itertools
import math
from collections.abc import Iterator

import numpy as np

from moejax.balance.policies.eplb import replicate
from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import EMPTY, ExpertPlan
from moejax.plan.layout import Layout

NUM_SHIFTED = 2
"""Number of experts that give a replica in shifted candidates, and of those that get
one."""


def plan(
    load_lwe: np.ndarray,
    layout: Layout,
    cost: CostModel,
    current: ExpertPlan,
    *,
    num_nodes: int = 1,
) -> ExpertPlan:
    """Return the candidate with the best score in each layer, whatever the current plan
    is: nothing moves but what travels in each step anyway."""
    rows = [search(load_we, layout, cost, num_nodes) for load_we in load_lwe]
    return ExpertPlan(np.stack(rows), layout.num_experts)


def search(
    load_we: np.ndarray, layout: Layout, cost: CostModel, num_nodes: int = 1
) -> np.ndarray:
    """Return the slots of one layer, int32 [p]: those of the first candidate with the
    lowest score."""
    load_e = load_we.sum(axis=0).astype(float)
    sizes = (layout.num_devices, layout.slots_per_device)
    num_nodes = math.gcd(num_nodes, layout.num_devices)  # a domain may span several
    tables = [
        place(load_e, replicas_e, *sizes, num_nodes)
        for replicas_e in candidates(load_e, *sizes)
    ]
    return min(tables, key=lambda row_p: score(load_we, row_p, cost))


def candidates(
    load_e: np.ndarray, num_devices: int, slots_per_device: int
) -> Iterator[np.ndarray]:
    """Yield numbers of replicas of each expert, int [e]: from 1 to the number of
    devices, and at most as many as there are slots in all."""
    num_experts, num_slots = len(load_e), num_devices * slots_per_device
    order_e = np.argsort(-load_e, kind="stable")
    base = min(num_slots // num_experts, num_devices)
    even_e = np.full(num_experts, base)
    if base < num_devices:
        even_e[order_e[: num_slots - base * num_experts]] += 1
    _, proportional_e = replicate(load_e, num_slots, num_devices)
    yield even_e
    yield proportional_e
    share_e = load_e / proportional_e
    hottest = np.argsort(-share_e, kind="stable")
    takers = [e for e in hottest if proportional_e[e] < num_devices][:NUM_SHIFTED]
    givers = [e for e in hottest[::-1] if proportional_e[e] > 1][:NUM_SHIFTED]
    for giver in givers:
        for taker in takers:
            if giver != taker:
                shifted_e = proportional_e.copy()
                shifted_e[[giver, taker]] += (-1, 1)
                yield shifted_e


def place(
    load_e: np.ndarray,
    replicas_e: np.ndarray,
    num_devices: int,
    slots_per_device: int,
    num_nodes: int = 1,
) -> np.ndarray:
    """Return the slots of one layer, int32 [p], with each expert at most once on a
    device.

    Where fewer devices have room than an expert has replicas, it gets one on each of
    them.
    """
    share_e = (load_e / replicas_e).tolist()
    held = [[] for _ in range(num_devices)]
    # Heaps of the devices of each node that have room: the one with the fewest rows
    # first, of equal ones the first.
    nodes = [
        [(0.0, device) for device in node]
        for node in itertools.batched(range(num_devices), num_devices // num_nodes)
    ]
    for expert in sorted(range(len(share_e)), key=lambda e: -share_e[e]):
        chosen, num_missing = [], int(replicas_e[expert])
        while num_missing > 0 and any(nodes):  # one more device of each node
            firsts = sorted((heapq.heappop(node), node) for node in nodes if node)
            chosen += firsts[:num_missing]
            for entry, node in firsts[num_missing:]:
                heapq.heappush(node, entry)
            num_missing -= len(firsts)
        for (rows, device), node in chosen:
            held[device].append(expert)
            if len(held[device]) < slots_per_device:
                heapq.heappush(node, (rows + share_e[expert], device))
    table_ws = np.full((num_devices, slots_per_device), EMPTY, np.int32)
    for row_s, experts in zip(table_ws, held):
        row_s[: len(experts)] = experts
    return table_ws.reshape(-1)


def score(load_we: np.ndarray, row_p: np.ndarray, cost: CostModel) -> float:
    """Return 4 sum_i comm_i + (3 + ckpt) max_g comp_g, in seconds.

    comm_i is the time in which device i sends its rows to other devices, comp_g the
    forward time of device g. ckpt is 1 where the backward pass computes experts again.
    Rows of an expert go to all of its replicas in equal numbers (split 'even').
    """
    w, num_experts = load_we.shape
    device_p = np.arange(len(row_p)) // (len(row_p) // w)
    is_full_p = row_p >= 0
    held_we = np.zeros((w, num_experts))
    held_we[device_p[is_full_p], row_p[is_full_p]] = 1
    share_we = held_we / held_we.sum(axis=0)
    comp = cost.compute_sec(share_we @ load_we.sum(axis=0))
    num_sent = (load_we * (1 - share_we)).sum()
    comm = num_sent * cost.bytes_per_row / cost.bytes_per_sec
    return float(4 * comm + cost.num_computed * comp)
