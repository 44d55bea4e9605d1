"""EPLB, DeepSeek-V3's balancer (github.com/deepseek-ai/EPLB): replicate, then pack.

    replicate   give each spare slot to the expert with the most rows per replica
    pack        place replicas from the heaviest down, each on the lightest device with
                room

The *hierarchical* variant packs groups of experts on nodes first, and then stays inside
a node. The *global* variant has one group on one node. Here replicas of one expert
never share a device; in the published code they may.
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
    num_expert_groups: int = 1,
    num_nodes: int = 1,
) -> ExpertPlan:
    """Return a plan made from the load alone, without regard to costs and to the
    current plan."""
    shape = (layout.num_devices, layout.slots_per_device)
    rows = [
        rebalance(load_we.sum(axis=0), *shape, num_expert_groups, num_nodes)
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
    """Return the slots of one layer, int32 [p].

    The variant is hierarchical where the nodes divide the groups and the devices, else
    global.
    """
    if num_groups % num_nodes or num_devices % num_nodes:
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
    """Return the expert of each replica, and the number of replicas of each expert.

    The first replicas are one of each expert; the spare ones follow in the order in
    which they are made. An expert has at most one replica per device, and only one if
    it has no load.
    """
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
    """Return the items of each pack, in the order in which they were placed.

    The heaviest item is placed first. Each goes into the lightest pack with room that
    has no item of the same expert; of equally light packs into the one with fewer
    items, then into that with the lower index. If packs hold one item each and there
    are as many items as packs, item i goes into pack i.
    """
    if len(load) == num_packs and items_per_pack == 1:
        return [[item] for item in range(num_packs)]
    packs = [[] for _ in range(num_packs)]
    lightest = [(0.0, 0, index) for index in range(num_packs)]
    for item in sorted(range(len(load)), key=lambda item: -load[item]):
        entries = []
        while lightest and expert[item] in _experts(packs[lightest[0][2]], expert):
            entries.append(heapq.heappop(lightest))
        if lightest:
            rows, count, index = heapq.heappop(lightest)
            packs[index].append(item)
            entries.append((rows + load[item], count + 1, index))
        else:
            _make_room(packs, item, expert, load, items_per_pack)
            entries = [
                (sum(load[i] for i in items), len(items), index)
                for index, items in enumerate(packs)
            ]
        for entry in entries:
            if entry[1] < items_per_pack:
                heapq.heappush(lightest, entry)
    return packs


def _experts(items: list[int], expert: list[int]) -> list[int]:
    """Return the entries of `expert`, the expert of each item, for these items."""
    return [expert[i] for i in items]


def _make_room(packs, item, expert, load, items_per_pack) -> None:
    """Place an item whose expert is in every pack that has room.

    A full pack without the expert takes the item and gives one of its own to a pack
    with room. That is always possible, since an expert has at most as many replicas as
    there are packs. The exchange whose heavier pack is the lightest is made.
    """
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
