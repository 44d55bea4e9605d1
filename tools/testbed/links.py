"""Measurement of the seconds that schedules and domains save over slow links between
two data centres (DCs).

    domains     mesh dc=2, expert=2: plain expert parallelism against the chosen domain,
                for rows D and experts P_E of several sizes
    schedules   mesh expert=2 (between DCs), tensor=2 (inside): base against s1, s2, s1h
    selector    24 layer shapes on that mesh: is the chosen schedule the fastest?

Each part is one run of tools/bench/communication.py on a cluster of 2 DCs with 2
devices each. That program measures the collectives first, then all variants of each
case in turns. A DC is one process with two devices, because compiling takes most of the
time and only process 0 finds programs in JAX's cache. No figure is given where links
cannot be shaped.
"""

import json
import pathlib
import tempfile

from tools.testbed.balancer import Options
from tools.testbed.cluster import Cluster, make_cluster
from tools.testbed.lock import say

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tools" / "bench" / "communication.py"
RATE_MBIT = 100.0
LIMIT_SEC = 3600.0
WIDE = 2048
"""d_model of all cases but the selector's. Wide tokens take few FLOPs per byte, which
matters since two cores compute for four devices."""
PLAIN, DOMAINS = "1x1", ("1x1", "2x1", "1x2", "2x2")
SCHEDULES = ("base", "s1", "s2", "s1h")
NEAR = 1.10
"""Maximum ratio of the chosen schedule's time to the fastest one's, for a choice that
counts as right."""

ROWS_MB = {0.5: 32, 2: 128, 8: 512}
"""Tokens of a device, by D in MiB: each takes 8 KiB and makes 2 choices."""
EXPERT_MB = {0.25: 11, 1: 43, 4: 171}
"""Hidden width of an expert, by P_E in MiB: 24 KiB per unit of width, one expert per
device."""
SENT_MB = {1: {1.2: (106, 1), 4.8: (26, 4)}, 4: {1.2: (424, 1), 4.8: (106, 4)}}
"""Tokens and choices, by the MiB of a tensor group's full send buffer, then by k f: the
choices per token times the buffer factor."""
LAYERS = (
    # tokens, d_model, d_expert, num_experts, top_k, expert_shards
    (32, 512, 32, 4, 2, 2), (128, 512, 32, 4, 2, 2), (128, 1024, 32, 4, 2, 2),
    (64, 2048, 16, 4, 1, 2), (32, 1024, 128, 8, 2, 2), (128, 1024, 128, 8, 2, 2),
    (64, 512, 256, 8, 2, 2), (256, 512, 256, 8, 2, 2), (32, 1024, 256, 8, 1, 2),
    (64, 2048, 128, 8, 2, 2), (16, 2048, 128, 16, 2, 2), (128, 256, 512, 16, 4, 2),
    (32, 512, 32, 4, 2, 1), (128, 512, 128, 8, 2, 1), (64, 2048, 64, 8, 2, 1),
    (32, 1024, 256, 8, 4, 1), (256, 256, 256, 8, 2, 1), (64, 1024, 256, 8, 1, 1),
    (32, 512, 32, 4, 2, 4), (128, 512, 128, 8, 2, 4), (64, 2048, 64, 8, 2, 4),
    (32, 1024, 256, 8, 4, 4), (256, 256, 256, 8, 2, 4), (64, 1024, 256, 8, 1, 4),
)  # fmt: skip
"""Layers of the selector, so small that a step takes at most half a second."""


def domains(options: Options) -> dict:
    """Measure the time that domains save over slow links. Return the record of the
    cases and the claimed figures."""
    record = _measure("dc=2,expert=2", domain_cases(), options)
    return {"domains": record} | _drop_unshaped(record, domain_figures(record))


def domain_cases() -> list[dict]:
    """Return the cases of domains that tools/bench/communication.py measures: one for
    each size of rows and of experts."""
    return [
        {
            "name": f"D={rows:g} P_E={experts:g}",
            "shape": {
                "tokens": tokens,
                "d_model": WIDE,
                "d_expert": width,
                "num_experts": 4,
                "top_k": 2,
            },
            "variants": DOMAINS,
        }
        for rows, tokens in ROWS_MB.items()
        for experts, width in EXPERT_MB.items()
    ]


def domain_figures(record: dict) -> dict:
    """Return the figures of the domains, from the times of the variants themselves.

    `domains_speedup` is the time of the plain variant over that of the chosen one where
    rows are largest and experts smallest, `domains_worst` the smallest such ratio of
    the grid. The variant 'auto' is the chosen one, measured once more: the difference
    between the two, in `domains_again`, is noise.
    """
    gains, again = {}, {}
    for case in record["cases"]:
        sec, chosen = case["step_sec"], case["chosen"]
        gains[case["name"]] = round(sec[PLAIN] / sec[chosen], 3)
        again[case["name"]] = round(sec["auto"] / sec[chosen], 3)
    tokens_dominate = f"D={max(ROWS_MB):g} P_E={min(EXPERT_MB):g}"
    return {
        "domains_speedup": gains[tokens_dominate],
        "domains_worst": min(gains.values()),
        "domains_gains": gains,
        "domains_again": again,
        "domains_chosen": {c["name"]: c["chosen"] for c in record["cases"]},
    }


def schedules(options: Options) -> dict:
    """Measure the time that each schedule takes over slow links. Return the record of
    the cases and the claimed figures."""
    record = _measure("expert=2,tensor=2", schedule_cases(), options)
    return {"schedules": record} | _drop_unshaped(record, schedule_figures(record))


def schedule_cases() -> list[dict]:
    """Return the cases of schedules that tools/bench/communication.py measures: one for
    each buffer size and each k f, the choices per token times the buffer factor."""
    return [
        {
            "name": f"{size} MiB kf={factor}",
            "shape": {
                "tokens": tokens,
                "d_model": WIDE,
                "d_expert": 16,
                "num_experts": 4,
                "top_k": top_k,
                "buffer_factor": 1.2,
            },
            "variants": SCHEDULES,
        }
        for size, rows in SENT_MB.items()
        for factor, (tokens, top_k) in rows.items()
    ]


def schedule_figures(record: dict) -> dict:
    """Return the figures of the schedules.

    `s1_speedup` and `s1h_speedup` are the time of base over that of each, the smaller
    ratio of the two cases of 4 MiB.
    """
    gains = {
        case["name"]: {
            variant: round(case["step_sec"]["base"] / case["step_sec"][variant], 3)
            for variant in SCHEDULES
            if variant != "base"
        }
        for case in record["cases"]
    }
    largest = [gain for name, gain in gains.items() if name.startswith("4 MiB")]
    return {
        "s1_speedup": min(gain["s1"] for gain in largest),
        "s1h_speedup": min(gain["s1h"] for gain in largest),
        "schedules_gains": gains,
    }


def selector(options: Options) -> dict:
    """Measure how well the schedule is chosen for layers on slow links. Return the
    record of the cases and the claimed figures."""
    record = _measure("expert=2,tensor=2", layer_cases(), options)
    return {"selector": record} | _drop_unshaped(record, selector_figures(record))


def layer_cases() -> list[dict]:
    """Return the layers that tools/bench/communication.py measures, a case for each of
    LAYERS."""
    keys = ("tokens", "d_model", "d_expert", "num_experts", "top_k", "expert_shards")
    cases = []
    for number, layer in enumerate(LAYERS):
        shape = dict(zip(keys, layer)) | {"buffer_factor": 1.25}
        is_local = shape["expert_shards"] == 2
        variants = [*SCHEDULES, "local"] if is_local else list(SCHEDULES)
        cases.append({"name": f"layer {number}", "shape": shape, "variants": variants})
    return cases


def selector_figures(record: dict) -> dict:
    """Return the figures of the selector, from the times of the variants themselves:
    the second time of the chosen one, 'auto', does not count.

    `selector_right` is the share of layers whose chosen schedule is the fastest
    measured, or takes at most NEAR times as long.
    """
    loss = {}
    for case in record["cases"]:
        sec = {variant: case["step_sec"][variant] for variant in case["predicted_sec"]}
        loss[case["name"]] = round(sec[case["chosen"]] / min(sec.values()), 3)
    return {
        "selector_right": round(sum(x <= NEAR for x in loss.values()) / len(loss), 3),
        "selector_fastest": round(sum(x == 1 for x in loss.values()) / len(loss), 3),
        "selector_over_fastest": loss,
    }


def _drop_unshaped(record: dict, figures: dict) -> dict:
    """Return the figures; all become None if the rate of links could not be limited."""
    return figures if record["is_shaped"] else dict.fromkeys(figures)


def _measure(mesh: str, cases: list[dict], options: Options) -> dict:
    """Run tools/bench/communication.py on a cluster, and return its record with
    `is_shaped` and `wall_sec`. Raises OSError when the program fails."""
    cluster = Cluster(dcs=2, per_dc=1, rate_mbit=RATE_MBIT)
    with (
        tempfile.TemporaryDirectory(prefix="testbed-") as folder,
        make_cluster(cluster) as live,
    ):
        path = pathlib.Path(folder) / "cases.json"
        path.write_text(json.dumps(cases))
        flags = [f"--mesh={mesh}", f"--cases={path}", f"--turns={options.repeats}"]
        say(f"{len(cases)} cases on mesh {mesh}")
        result = live.run([str(PROGRAM), *flags, "--json"], timeout_sec=LIMIT_SEC)
        if result.exit_code:
            raise OSError(f"{PROGRAM.name} ended with code {result.exit_code}")
    record = json.loads(result.lines[-1])
    sent = [round(1e-6 * size, 1) for size in result.uplink_bytes]
    say(f"{result.wall_sec:.0f} s; {sent} MB left the DCs")
    return record | {"is_shaped": result.is_shaped, "wall_sec": result.wall_sec}
