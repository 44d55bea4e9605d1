"""HybridEP (arXiv 2510.19470): experts move instead of tokens."""

import math

import numpy as np

from moejax.perf import cluster as clusters
from moejax.perf import exchange
from moejax.perf.layer_times import sum_sec
from moejax.perf.stated import cluster_calibration
from moejax.perf.terms import num_devices
from moejax.plan.layout import Topology
from moejax.plan.parallel import candidate_domains
from tools.simulated.papers.layers import domain_layer, equal_lines
from tools.simulated.papers.row import Row, Table

GB, MB, MSEC = 1e9, 1e6, 1e-3
CASES = (
    ("Mix-1", 0.049, 8.0, 4.7, 2),
    ("Mix-2", 0.049, 8.0, 2.35, 4),
    ("AG-only-1", 0.099, 3.0, 0.094, 8),
    ("AG-only-2", 0.099, 3.0, 0.047, 8),
)
"""Table IV: name, ms before the experts, MB of rows and of experts, and the domain of
the published ratio p, which the paper computes as 1 - S / 8."""
ROWS_MB = (6, 12, 24, 48, 96, 192)
TABLE_V = {
    "M": {
        "Tutel": (2.52, 4.26, 5.82, 7.62, 12.65, 20.35),
        "HybridEP": (2.48, 2.63, 2.74, 2.82, 3.01, 3.78),
    },
    "L": {
        "Tutel": (3.74, 7.30, 10.69, 13.54, 18.59, 28.46),
        "HybridEP": (3.49, 3.53, 3.54, 3.85, 4.24, 5.20),
    },
}
"""Seconds of an iteration by MB of rows, experts of 0.36 MB."""
NODES = {"M": 2, "L": 4}
COMPRESSION = 50
GATHERS = 12
"""Gathers of experts in an iteration (ours)."""
EXCHANGES = 24
"""all_to_alls of an iteration: four for each of 6 MoE layers in 12 blocks (ours)."""


def tables() -> list[Table]:
    return [_frequencies(), _ratios(), _slopes(), _speedups(), _migration(), _many()]


def _frequencies() -> Table:
    """Table VII: how many ordered pairs of devices exchange rows and experts."""
    rows = []
    for g, s in ((8, 2), (8, 4), (16, 4), (16, 16), (32, 8)):
        found = exchange.groups({"expert": g}, (s,))
        pairs = [g * (num_devices(found[name]) - 1) for name in ("owners", "domain")]
        formula = [g * (g // s - 1), g * (s - 1)]
        rows.append(
            Row(f"G = {g}, domains of {s}", _pair(formula), _pair(pairs), tolerance=0)
        )
    setting = (
        "Ordered pairs that send rows, and that send experts: the paper's formula, "
        "G (G / S - 1) and G (S - 1), and the groups of devices of our layouts."
    )
    return Table("Table VII, frequencies", setting, tuple(rows))


def _pair(numbers: list[int]) -> str:
    return f"{numbers[0]} and {numbers[1]}"


def _ratios() -> Table:
    """Table IV, under both readings of its unit."""
    rows = []
    for unit, rate in (("128 Gb/s", 16 * GB), ("128 GB/s", 128 * GB)):
        lines = equal_lines({"expert": 8}, rate)
        for name, before_msec, row_mb, expert_mb, published in CASES:
            sec = {
                s: domain_layer(
                    lines, {"expert": 8}, (s,), row_bytes=row_mb * MB,
                    expert_bytes=expert_mb * MB, before_sec=before_msec * MSEC,
                ).forward_sec
                for s in (1, 2, 4, 8)
            }  # fmt: skip
            best = min(sec, key=sec.get)
            note = "" if best == published else (
                f"{sec[best] / MSEC:.3g} ms beside {sec[published] / MSEC:.3g} ms: the "
                "paper's figure follows from 128 GB/s"
            )  # fmt: skip
            what = f"{name}, links of {unit}: devices of a domain"
            rows.append(Row(what, published, best, note=note, tolerance=0))
    setting = (
        "The fastest domain of 8 devices. The paper states 128 Gb/s; its ratios follow "
        "if these are gigabytes."
    )
    return Table("Table IV, transmission ratios", setting, tuple(rows))


def _lines(name: str):
    cluster = clusters.load("hybridep").with_outer(NODES[name])
    return cluster_calibration(cluster, Topology(dc=NODES[name], expert=8))


def _exchange_sec(name: str, domain: tuple[int, int], row_mb: float) -> float:
    """Return the seconds of one all_to_all on a cluster of Table V."""
    sizes = {"dc": NODES[name], "expert": 8}
    layer = domain_layer(
        _lines(name), sizes, domain, row_bytes=row_mb * MB, expert_bytes=0.36 * MB
    )
    return layer.exchange_sec / 4


def _slopes() -> Table:
    """Table V: seconds by MB of rows."""
    rows = []
    for name, systems in TABLE_V.items():
        published = systems["Tutel"]
        priced = EXCHANGES * (
            _exchange_sec(name, (1, 1), 192) - _exchange_sec(name, (1, 1), 96)
        ) / 96  # fmt: skip
        last = (published[5] - published[4]) / 96
        fitted = float(np.polyfit(ROWS_MB, published, 1)[0])
        for what, slope in (("between 96 and 192 MB", last), ("of all six", fitted)):
            note = ""
            if abs(priced / slope - 1) > 0.1:
                exchanges = slope / priced * EXCHANGES
                note = f"as from {exchanges:.3g} exchanges; the times are no line"
            row = Row(
                f"Cluster-{name}, Tutel, slope {what}", 1e3 * slope, 1e3 * priced,
                "ms/MB", note=note, tolerance=0.1,
            )  # fmt: skip
            rows.append(row)
    setting = (
        "Nodes of 8 GPUs that share Ethernet of 10 Gb/s, 24 all_to_alls in an "
        "iteration (ours). With a card for each GPU the price would be an eighth."
    )
    return Table("Table V, seconds by bytes of rows", setting, tuple(rows))


def _speedups() -> Table:
    """Table V: how many times as fast HybridEP is as Tutel."""
    rows = []
    for name, systems in TABLE_V.items():
        rest_sec = systems["Tutel"][0] - EXCHANGES * _exchange_sec(name, (1, 1), 6)
        for number, row_mb in enumerate(ROWS_MB):
            tutel, hybrid = (systems[x][number] for x in ("Tutel", "HybridEP"))
            plain = rest_sec + EXCHANGES * _exchange_sec(name, (1, 1), row_mb)
            chosen = min(
                rest_sec + _layer_sec(name, domain, row_mb) * EXCHANGES / 4
                for domain in candidate_domains((NODES[name], 8))
            )
            note = ""
            if abs(plain / chosen / (tutel / hybrid) - 1) > 0.15:
                note = "Tutel's published times rise faster than bytes below 48 MB"
                if row_mb >= 48:
                    note = (
                        "the published HybridEP grows with D, a whole domain does not"
                    )
            what = f"Cluster-{name}, D = {row_mb} MB"
            rows.append(Row(what, tutel / hybrid, plain / chosen, "x", note=note))
    setting = (
        "Tutel over HybridEP. Priced: plain expert parallelism over the fastest "
        "domain, both with the rest of an iteration that Tutel's first time leaves."
    )
    return Table("Table V, speedups", setting, tuple(rows))


def _layer_sec(name: str, domain: tuple[int, int], row_mb: float) -> float:
    sizes = {"dc": NODES[name], "expert": 8}
    layer = domain_layer(
        _lines(name), sizes, domain, row_bytes=row_mb * MB, expert_bytes=0.36 * MB
    )
    return layer.prediction.sec


def _migration() -> Table:
    """Table VI: what compression of experts saves."""
    published = {
        ("M", 24, 8, (2, 2)): (3.41, 2.54), ("L", 24, 8, (4, 1)): (6.12, 3.48),
        ("M", 48, 2, (2, 8)): (6.21, 2.81), ("L", 48, 2, (4, 8)): (10.89, 3.86),
    }  # fmt: skip
    rows = []
    for (name, row_mb, expert_mb, domain), times in published.items():
        sizes, expert_bytes = {"dc": NODES[name], "expert": 8}, expert_mb * MB
        sec = []
        for ratio in (1, COMPRESSION):
            layer = domain_layer(
                _lines(name), sizes, domain, row_bytes=row_mb * MB,
                expert_bytes=expert_bytes, gathered_bytes=expert_bytes / ratio,
            )  # fmt: skip
            sec.append(sum_sec(layer.cost.weight_terms(layer.layout).ahead))
        priced, found = GATHERS * (sec[0] - sec[1]), times[0] - times[1]
        note = f"as from {found / priced * GATHERS:.0f} gathers of an iteration"
        if domain[1] == 8:
            note = (
                "our gather sends an expert once to each node, the paper's to each GPU"
            )
        what = f"Cluster-{name}, D = {row_mb} MB, experts of {expert_mb} MB, domain "
        rows.append(
            Row(f"{what}{domain[0]} x {domain[1]}", found, priced, "s", note=note)
        )
    setting = (
        "Seconds of an iteration that compression of 50 times saves, with the domains "
        "that the paper names. Priced: experts of 6 MoE layers, gathered forward and "
        "again backward (ours; the paper does not say how often). In training the "
        "uncompressed gradients of gathered experts return, which it does not count."
    )
    return Table("Table VI, compressed experts", setting, tuple(rows))


def _many() -> Table:
    """Fig. 17: a thousand data centres."""
    g = 1000

    def gain(size: int) -> float:
        sec = [
            domain_layer(
                equal_lines({"expert": g}, 1.25 * GB), {"expert": g}, (s,),
                row_bytes=16 * MB, expert_bytes=1e-6,
            ).exchange_sec
            for s in (1, size)
        ]  # fmt: skip
        return math.inf if sec[1] == 0 else sec[0] / sec[1]

    rows = (
        Row("domains of 50", 1.05, gain(50), "x"),
        Row("domains of 250", "up to 1.45 x", gain(250), "x"),
        Row("domains of 500", "up to 1.45 x", gain(500), "x"),
        Row("domains of 8", "at least 1.05 x", gain(8), "x",
            note="so the paper's fixed domains had hundreds of devices"),
    )  # fmt: skip
    setting = (
        "A thousand data centres of one GPU: plain all_to_all over that between "
        "domains. The paper gives neither bandwidths, sizes nor domains, so that the "
        "gain can be no more than (1 - 1 / G) / (1 - S / G)."
    )
    return Table("Fig. 17, a thousand data centres", setting, rows)
