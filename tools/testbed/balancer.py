"""Measurement of the seconds that the balancer saves on eight equally slow devices.

The workers run configs/testbed_skew.gin with a recorded routing, under all variants in
turn (tools/bench/balance.py). They compile without a quota. Then each process gets its
CPU quota, and the steps after that count.
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
"""Variants, each with the settings that it adds to the config.

The buffers of `micromoe` fit its own fullest pair of devices, as a balancer would
choose them (home's pairs are 2.6 times as full). The fastest variant other than `home`
is reported as `balancer_best`. Split 'dynamic' is not among them: it was slower here,
since its copies travel in every step."""
LIMIT_SEC = 1500.0
"""Time limit in seconds: compiling eight times on two cores takes minutes."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the measurements."""

    trace: pathlib.Path
    """File with a recorded routing. If it does not exist, a Zipf load replaces it."""
    repeats: int = 5
    """Number of steps, or turns, of each variant that count."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(
                f"repeats={self.repeats} must be 1 or more: give another value"
            )


def balancer(options: Options) -> dict:
    """Measure the balancer's speedup, and return the record of `make_record`."""
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
    """Return the balancer's figures, from the record of each variant.

    `balancer_speedup` is the time of `home` over that of the fastest other variant.
    Without quotas it is None, since eight processes then share the cores as they like.
    `balancer_modelled` is the ratio of the two variants' device max/mean in the timed
    steps.
    """
    home = variants["home"]
    others = {name: variant for name, variant in variants.items() if name != "home"}
    best = min(others, key=lambda name: others[name]["median_sec"])
    speedup = home["median_sec"] / variants[best]["median_sec"]
    return {
        "balancer_speedup": round(speedup, 3) if is_slowed else None,
        "balancer_modelled": round(
            home["device_max_over_mean"] / variants[best]["device_max_over_mean"], 3
        ),
        "balancer_best": best,
        "balancer_has_quota": is_slowed,
        "balancer_variants": variants,
    }
