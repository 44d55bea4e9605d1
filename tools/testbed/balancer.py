"""What the balancer gains in seconds, on eight equal slow devices and a real routing.

The workers run configs/testbed_skew.gin under all variants in turn
(tools/bench/balance.py). Compiling is free; then each process gets its quota, and the
steps after that count.
"""

import dataclasses
import json
import pathlib
import tempfile

from tools.testbed import trace as testbed_trace
from tools.testbed.cluster import Cluster, make_cluster

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "testbed_skew.gin"
DEVICES, QUOTA, LAYER = 8, 0.25, 16
VARIANTS = (
    "home",
    "micromoe: Balance.policy = 'micromoe'; Dispatch.store = 'resident'; "
    "Dispatch.slots_per_device = 5; Dispatch.buffer_factor = 1.5",
)
"""What each adds to the config, and buffers for its own fullest pair, as a balancer
fits them (home's pairs are 2.6 times as full). The fastest of the others is
`balancer_best`; split 'dynamic' was not one here, with its copies in every step."""
LIMIT_SEC = 1500.0
"""Compiling eight times on two cores takes minutes."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How much is measured."""

    trace: pathlib.Path
    """No such file: a Zipf load stands in."""
    repeats: int = 5
    """Steps of each variant, or turns, that count."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats={self.repeats} must be 1 or more: give another")


def balancer(options: Options) -> dict:
    """The record: `balancer_speedup`, `balancer_modelled` (fullest device of home over
    that of the fastest other, in the steps that were timed), and what they come
    from."""
    cluster = Cluster(dcs=1, per_dc=DEVICES, rate_mbit=None)
    with (
        tempfile.TemporaryDirectory(prefix="testbed-") as name,
        make_cluster(cluster) as live,
    ):
        folder = pathlib.Path(name)
        ready, has_quota = folder / "ready", False

        def watch() -> bool:
            nonlocal has_quota
            if ready.exists() and not has_quota:
                live.set_quota(QUOTA)
                has_quota = True
            return False

        live.set_quota(None)
        load = testbed_trace.bindings(options.trace, LAYER, folder)
        program = [str(ROOT / "tools/bench/balance.py"), f"--gin_file={CONFIG}"]
        program += [f"--gin_param={param}" for param in load]
        program += [word for variant in VARIANTS for word in ("--variant", variant)]
        program += ["--turns", str(options.repeats), "--ready", str(ready), "--json"]
        result = live.run(program, timeout_sec=LIMIT_SEC, watch=watch, is_shown=True)
        if result.exit_code:
            raise OSError(f"the measurement ended with code {result.exit_code}")
        has_groups = live.groups is not None
    return make_record(json.loads(result.lines[-1]), is_slowed=has_groups and has_quota)


def make_record(variants: dict, *, is_slowed: bool) -> dict:
    """Without quotas the eight share two cores as they like: that is no such cluster,
    and there is no figure."""
    home = variants["home"]
    others = {name: variant for name, variant in variants.items() if name != "home"}
    best = min(others, key=lambda name: others[name]["median_sec"])
    speedup = home["median_sec"] / variants[best]["median_sec"]
    return {
        "balancer_speedup": round(speedup, 3) if is_slowed else None,
        "balancer_modelled": round(
            home["max_over_mean"] / variants[best]["max_over_mean"], 3
        ),
        "balancer_best": best,
        "balancer_has_quota": is_slowed,
        "balancer_variants": variants,
    }
