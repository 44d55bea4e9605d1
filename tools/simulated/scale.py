"""The best way to run beside plain expert parallelism, on ever more devices.

Plain expert parallelism has the fastest mesh with an expert axis, experts at home, no
domain, and no balancing. The batch grows where there are more devices than
sequences.
"""

import dataclasses
import time
from typing import NamedTuple

import numpy as np

from moejax.config import Config
from moejax.perf.cluster import Cluster
from tools.simulated import report
from tools.simulated.what_if import Answer, plain, what_if

FIRST_DEVICES = 8


class Size(NamedTuple):
    """One number of devices."""

    cluster: Cluster
    plain: Answer
    best: Answer
    planned_sec: float
    """Seconds that the search took here."""

    @property
    def gain(self) -> float:
        """How many times as fast the best way is, token for token."""
        return self.plain.sec_per_token / self.best.sec_per_token


def scale(cfg: Config, cluster: Cluster, load: str, most: int) -> list[Size]:
    """Return the sizes of a cluster from 8 devices to `most`, each four times the last
    one. Its outermost level grows; smaller sizes have fewer inner units.

    Raises ValueError where a size cannot run the configuration.
    """
    numbers, number = [], FIRST_DEVICES
    while number < most:
        numbers.append(number)
        number *= 4
    found = []
    for number in [*numbers, most]:
        begin = time.perf_counter()
        try:
            there = sized(cluster, number)
            home = plain(cfg, there, load)
            best = what_if(cfg, there, load, count=1).found[0]
        except ValueError as fault:
            if number < most:  # too few devices hold the model
                continue
            raise ValueError(f"{number} devices: {fault}") from fault
        found.append(Size(there, home, best, time.perf_counter() - begin))
    return found


def sized(cluster: Cluster, num_devices: int) -> Cluster:
    """Return a cluster of this number of devices, whose outermost level has as many
    units as it takes. Raises ValueError where units would be cut."""
    levels, left = [], num_devices
    for level in cluster.levels[:-1]:
        size = min(level.size, left)
        if left % size:
            raise ValueError(f"{num_devices} devices do not fill units of {size}")
        levels.append(dataclasses.replace(level, size=size))
        left //= size
    outer = dataclasses.replace(cluster.levels[-1], size=left)
    return dataclasses.replace(cluster, levels=(*levels, outer))


def lines(found: list[Size], tokens: float) -> list[str]:
    """Return the table as lines."""
    head = (
        f"{'devices':>9}{'plain tok/s':>15}{'best tok/s':>15}{'gain':>7}{'MFU':>7}"
        f"{'device h':>12}{'planned s':>11}  mesh, how"
    )
    return [head, *(_line(size, tokens) for size in found)]


def _line(size: Size, tokens: float) -> str:
    number, best = size.cluster.num_devices, size.best
    mfu = "" if best.mfu is None else f"{best.mfu:.1%}"
    mesh = " x ".join(map(str, best.cfg.mesh.sizes))
    hours = report.device_hours(best, number, tokens)
    return (
        f"{number:9,}{size.plain.tok_per_sec:15,.0f}{best.tok_per_sec:15,.0f}"
        f"{size.gain:7.2f}{mfu:>7}{hours:12,.0f}{size.planned_sec:11.2f}  {mesh}, "
        f"{report.how(best)}"
    )


def record(found: list[Size], tokens: float) -> dict:
    """Return the table as plain data, with the exponent by which the time of the search
    grows with the number of devices."""
    rows = [
        {
            "num_devices": size.cluster.num_devices,
            "plain_tok_per_sec": size.plain.tok_per_sec,
            "best_tok_per_sec": size.best.tok_per_sec,
            "gain": size.gain,
            "mfu": size.best.mfu,
            "device_hours": report.device_hours(
                size.best, size.cluster.num_devices, tokens
            ),
            "mesh": dataclasses.asdict(size.best.cfg.mesh),
            "how": report.how(size.best),
            "planned_sec": size.planned_sec,
        }
        for size in found
    ]
    return {"sizes": rows, "exponent": exponent(found)}


def exponent(found: list[Size]) -> float | None:
    """Return the slope of the logarithm of the search's time over that of devices; None
    for fewer than two sizes."""
    if len(found) < 2:
        return None
    devices = [size.cluster.num_devices for size in found]
    sec = [size.planned_sec for size in found]
    return float(np.polyfit(np.log(devices), np.log(sec), 1)[0])
