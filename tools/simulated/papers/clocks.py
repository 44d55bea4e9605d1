"""Our own clocks beside the price: tables that the testbed measured (docs/testbed.md,
docs/race.md), on clusters that are described and not calibrated."""

import dataclasses
import functools
import pathlib

import numpy as np
from jax.sharding import AbstractDevice

from moejax.balance.candidates import plan_at_layers
from moejax.balance.policies import make_valid_plan
from moejax.balance.settings import find_policy
from moejax.perf import cluster as clusters
from moejax.perf.cluster import Cluster
from moejax.perf.stated import cluster_calibration
from moejax.plan.layout import Topology
from moejax.resolve.partition import rows_per_step
from moejax.resolve.step_time import Scene
from tools.simulated import loads
from tools.simulated.papers.layers import domain_layer, tensor_layer
from tools.simulated.papers.models import TRACE
from tools.simulated.what_if import step_time
from train.config import gin_reader
from train.dry_run import resolve_on

MIB = 2.0**20
CONFIGS = pathlib.Path(__file__).resolve().parents[3] / "configs"
DOMAINS = ((1, 1), (2, 1), (1, 2), (2, 2))
DOMAIN_MSEC = {
    (0.5, 0.25): (228, 109, 201, 148), (0.5, 1): (208, 476, 248, 533),
    (0.5, 4): (224, 1851, 301, 2394), (2, 0.25): (864, 135, 1082, 149),
    (2, 1): (983, 472, 896, 555), (2, 4): (1001, 1962, 1164, 2272),
    (8, 0.25): (4075, 440, 4340, 374), (8, 1): (4261, 801, 4459, 677),
    (8, 4): (4086, 2275, 4653, 2583),
}  # fmt: skip
"""Milliseconds of a layer by MiB of rows and of experts, under DOMAINS."""
SCHEDULES = ("base", "s1", "s2", "s1h")
SCHEDULE_MSEC = {
    (1, 1.2): (1288, 520, 506, 382), (1, 4.8): (1204, 534, 510, 355),
    (4, 1.2): (5061, 2060, 1953, 1453), (4, 4.8): (5321, 2212, 2040, 1399),
}  # fmt: skip
"""Milliseconds of a layer by MiB of a full buffer and k f, under SCHEDULES."""
RACE_SEC = {
    "forced": 0.981, "micromoe": 1.096, "dynamic": 1.128, "eplb": 1.218,
    "flexmoe": 1.225, "laer": 1.414, "fastermoe": 1.479, "prophet": 1.508,
    "home": 2.508, "smartmoe": 2.585,
}  # fmt: skip
"""Seconds of a step of the race's arms at 5 Gb/s; `forced` has an even load."""
WITHIN = 0.1
"""Relative difference of measured times below which two ways count as equally fast."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """The ways to run one layer, on the clock and by the price."""

    name: str
    ways: tuple[str, ...]
    measured_sec: tuple[float, ...]
    priced_sec: tuple[float, ...]

    @property
    def chosen(self) -> int:
        return int(np.argmin(self.priced_sec))

    @property
    def is_right(self) -> bool:
        """Whether the way with the least price is the fastest, or nearly so."""
        return self.measured_sec[self.chosen] <= (1 + WITHIN) * min(self.measured_sec)


def cells() -> list[Cell]:
    return [*_domain_cells(), *_schedule_cells()]


def correlation(found: list[Cell]) -> float:
    """Return the correlation of the logarithms of measured and priced seconds."""
    measured = np.concatenate([cell.measured_sec for cell in found])
    priced = np.concatenate([cell.priced_sec for cell in found])
    return float(np.corrcoef(np.log(measured), np.log(priced))[0, 1])


def markdown() -> str:
    """Return the cells as Markdown, with the correlation and the share of right
    winners."""
    found = cells()
    right = sum(cell.is_right for cell in found)
    lines = [
        "One layer forward and backward on two data centres of two devices, links of "
        "100 Mb/s: milliseconds measured [priced]. The price knows the links' rates, "
        "and presumes the others (moejax/perf/clusters/testbed.toml). Correlation of "
        f"logarithms {correlation(found):.3f}; the way with the least price is the "
        f"fastest, or within {WITHIN:.0%} of it, in {right} of {len(found)} cells.",
        "",
    ]
    for ways in dict.fromkeys(cell.ways for cell in found):
        lines += [f"| | {' | '.join(ways)} | right |", f"|---|{'--:|' * len(ways)}---|"]
        for cell in found:
            if cell.ways == ways:
                pairs = zip(cell.measured_sec, cell.priced_sec)
                shown = [f"{1e3 * a:.0f} [{1e3 * b:.0f}]" for a, b in pairs]
                shown[cell.chosen] = f"**{shown[cell.chosen]}**"
                right = "yes" if cell.is_right else "no"
                lines.append(f"| {cell.name} | {' | '.join(shown)} | {right} |")
        lines.append("")
    return "\n".join([*lines, _race_markdown(), ""])


@functools.cache
def race() -> dict[str, float]:
    """Return the predicted seconds of a step of each arm of the race, in the two most
    uneven layers of the recorded load's last samples."""
    inner, outer = clusters.load("testbed").levels
    fast = dataclasses.replace(outer, bytes_per_sec=5e9 / 8)
    cluster = dataclasses.replace(clusters.load("testbed"), levels=(inner, fast))
    return {arm: _race_sec(arm, cluster) for arm in RACE_SEC}


def _race_sec(arm: str, cluster: Cluster) -> float:
    path = CONFIGS / ("race_cpu.gin" if arm == "home" else f"race/{arm}.gin")
    cfg = gin_reader.load([str(path)], [])
    run = resolve_on(cfg, AbstractDevice("cpu", None, "cpu"), None, cluster)
    layout = run.layout
    load = loads.EVEN if arm == "forced" else str(TRACE)
    pair = loads.pairs(load, layout.num_devices, layout.num_experts, 6)[-1]
    load_le = pair.planned_lwe.sum(axis=1)
    owned_lw = load_le.reshape(len(load_le), layout.num_devices, -1).sum(axis=2)
    fullest = np.argsort(-owned_lw.max(axis=1), kind="stable")[:2]
    rows = rows_per_step(cfg, layout) * layout.num_devices
    planned_lwe, met_lwe = (rows * share[fullest] for share in pair)
    plan = plan_at_layers(run.home_plan(), slice(len(fullest)))
    name = cfg.balance.policy
    if name != "home":
        policy = find_policy(run.settings, name)
        plan = make_valid_plan(name, policy, planned_lwe, layout, run.cost, plan)
    return step_time(run, cluster.device, Scene(met_lwe, plan, layout)).total


def race_figures() -> tuple[float, int, int]:
    """Return the correlation of logarithms over the arms, and how many of the pairs of
    arms the price has in the order of the clock, of how many."""
    measured, priced = (np.array(list(x.values())) for x in (RACE_SEC, race()))
    found = float(np.corrcoef(np.log(measured), np.log(priced))[0, 1])
    ahead = (measured[:, None] < measured) & (priced[:, None] < priced)
    return found, int(ahead.sum()), len(measured) * (len(measured) - 1) // 2


def _race_markdown() -> str:
    found, right, pairs = race_figures()
    lines = [
        "[The race](race.md), eight devices at 5 Gb/s: seconds of a step. Correlation "
        f"of logarithms {found:.3f}; {right} of {pairs} pairs of arms are in the "
        "order of the clock.",
        "",
        "| | measured | priced |",
        "|---|--:|--:|",
    ]
    lines += [f"| `{x}` | {RACE_SEC[x]:.2f} | {sec:.2f} |" for x, sec in race().items()]
    return "\n".join(lines)


def _cluster() -> Cluster:
    """Return the testbed with two devices in a data centre."""
    cluster = clusters.load("testbed")
    inner, outer = cluster.levels
    levels = dataclasses.replace(inner, size=2), dataclasses.replace(outer, sharing=2)
    return dataclasses.replace(cluster, levels=levels)


def _domain_cells() -> list[Cell]:
    lines = cluster_calibration(_cluster(), Topology(dc=2, expert=2))
    found = []
    for (row_mib, expert_mib), msec in DOMAIN_MSEC.items():
        sec = [
            domain_layer(
                lines, {"dc": 2, "expert": 2}, domain, row_bytes=row_mib * MIB,
                expert_bytes=expert_mib * MIB,
            ).prediction.sec
            for domain in DOMAINS
        ]  # fmt: skip
        ways = tuple(f"{a} x {b}" for a, b in DOMAINS)
        name = f"D = {row_mib:g} MiB, P_E = {expert_mib:g} MiB"
        found.append(Cell(name, ways, tuple(x / 1e3 for x in msec), tuple(sec)))
    return found


def _schedule_cells() -> list[Cell]:
    lines = cluster_calibration(_cluster(), Topology(expert=2, tensor=2))
    found = []
    for (buffer_mib, factor), msec in SCHEDULE_MSEC.items():
        tokens = round(buffer_mib * MIB / 4 / 2048 / factor)
        tokens -= tokens % 4
        sec = [
            tensor_layer(
                lines, schedule=schedule, tensor=2, shards=2, owners=2, tokens=tokens,
                factor=factor, d_model=2048, d_expert=1, flops_per_sec=1e18,
            ).prediction.sec
            for schedule in SCHEDULES
        ]  # fmt: skip
        name = f"buffer {buffer_mib} MiB, k f = {factor}"
        found.append(Cell(name, SCHEDULES, tuple(x / 1e3 for x in msec), tuple(sec)))
    return found
