"""EPLB, DeepSeek-V3's balancer (github.com/deepseek-ai/EPLB): replicate, then pack.

    replicate   each spare slot to the expert with the most rows per replica
    pack        replicas from the heaviest down, each on the lightest device with room

*Hierarchical* packs groups of experts on nodes first and stays inside a node after
that; *global* is one group on one node. Replicas of one expert never share a device,
which the published code leaves to chance.
"""

import heapq

import numpy as np

from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import EMPTY, ExpertPlan
from moejax.plan.layout import Layout


def plan(
    load_lwe: np.ndarray,
    layout: Layout,
    cost: CostModel,
    current: ExpertPlan,
    *,
    num_groups: int = 1,
    num_nodes: int = 1,
) -> ExpertPlan:
    """Per layer, from the load alone: neither costs nor the current plan count."""
    shape = (layout.num_devices, layout.slots_per_device)
    rows = [
        rebalance(load_we.sum(axis=0), *shape, num_groups, num_nodes)
        for load_we in load_lwe
    ]
    return ExpertPlan(np.stack(rows), layout.num_experts)


def rebalance(
    load_e: np.ndarray,
    num_devices: int,
    slots_per_device: int,
    num_groups: int = 1,
    num_nodes: int = 1,
) -> np.ndarray:
    """Slots of one layer, int32 [p]: hierarchical where the groups divide evenly over
    the nodes, else global."""
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    load_ge = load_e.reshape(num_groups, -1)
    expert_ge = np.arange(len(load_e)).reshape(num_groups, -1)
    group_load = load_ge.sum(axis=1).tolist()
    nodes = pack(
        group_load, list(range(num_groups)), num_nodes, num_groups // num_nodes
    )
    devices_per_node = num_devices // num_nodes
    table_ws = np.full((num_devices, slots_per_device), EMPTY, np.int32)
    for node, groups in enumerate(nodes):
        expert_x, replicas_e = replicate(
            load_ge[groups].reshape(-1),
            devices_per_node * slots_per_device,
            devices_per_node,
        )
        load_x = (load_ge[groups].reshape(-1) / replicas_e)[expert_x]
        held = pack(
            load_x.tolist(), expert_x.tolist(), devices_per_node, slots_per_device
        )
        logical = expert_ge[groups].reshape(-1)
        for device, items in enumerate(held, start=node * devices_per_node):
            table_ws[device, : len(items)] = logical[expert_x[items]]
    return table_ws.reshape(-1)


def replicate(
    load_e: np.ndarray, num_slots: int, num_devices: int
) -> tuple[np.ndarray, np.ndarray]:
    """Expert of each replica (one each, then the spare ones in order), and how many
    each expert has: no more than devices, and one where it has no load."""
    replicas_e = np.ones(len(load_e), int)
    spare = []
    heaviest = [(-load, expert) for expert, load in enumerate(load_e.tolist())]
    heapq.heapify(heaviest)
    while len(load_e) + len(spare) < num_slots and heaviest and heaviest[0][0] < 0:
        _, expert = heapq.heappop(heaviest)
        if replicas_e[expert] == num_devices:
            continue
        spare.append(expert)
        replicas_e[expert] += 1
        share = float(load_e[expert]) / int(replicas_e[expert])
        heapq.heappush(heaviest, (-share, expert))
    return np.concatenate([np.arange(len(load_e)), np.array(spare, int)]), replicas_e


def pack(
    load: list[float], expert: list[int], num_packs: int, items_per_pack: int
) -> list[list[int]]:
    """Items of each pack, in the order they came: the heaviest first, each into the
    lightest pack with room that has no item of its expert. Ties: fewer items, then the
    lower index. As many items as packs stay in their order."""
    if len(load) == num_packs and items_per_pack == 1:
        return [[item] for item in range(num_packs)]
    packs = [[] for _ in range(num_packs)]
    lightest = [(0.0, 0, index) for index in range(num_packs)]
    for item in sorted(range(len(load)), key=lambda item: -load[item]):
        passed = []
        while lightest and expert[item] in _experts(packs[lightest[0][2]], expert):
            passed.append(heapq.heappop(lightest))
        if lightest:
            rows, count, index = heapq.heappop(lightest)
            packs[index].append(item)
            passed.append((rows + load[item], count + 1, index))
        else:
            _make_room(packs, item, expert, load, items_per_pack)
            passed = [
                (sum(load[i] for i in items), len(items), index)
                for index, items in enumerate(packs)
            ]
        for entry in passed:
            if entry[1] < items_per_pack:
                heapq.heappush(lightest, entry)
    return packs


def _experts(items: list[int], expert: list[int]) -> list[int]:
    return [expert[i] for i in items]


def _make_room(packs, item, expert, load, items_per_pack) -> None:
    """Every pack with room has this expert: another pack takes the item and hands one
    of its own to a pack with room. One always can, for an expert has at most as many
    replicas as there are packs. The change that leaves the lighter fullest one wins."""
    rows = [sum(load[i] for i in items) for items in packs]
    choices = []
    for giver, items in enumerate(packs):
        if expert[item] in _experts(items, expert):
            continue
        for taker, others in enumerate(packs):
            if len(others) == items_per_pack:
                continue
            for given in items:
                if expert[given] not in _experts(others, expert):
                    heavier = max(
                        rows[giver] - load[given] + load[item],
                        rows[taker] + load[given],
                    )
                    choices.append((heavier, giver, taker, given))
    _, giver, taker, given = min(choices)
    packs[giver][packs[giver].index(given)] = item
    packs[taker].append(given)
