"""Print which options of balancing and communication do not go together, and why.

    python tools/combinations.py

Each pair of values is tried on a small model and eight devices (dc=2, expert=2,
tensor=2), with all other options as they are by default. A run accepts every pair that
is not in the table. docs/combinations.md is what this program prints.
"""

import argparse
import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Iterable
from typing import Any, get_args

from jax.sharding import AbstractMesh, AxisType

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # this folder's modules are tools.x, never top-level names

from moejax.axes import AXES  # noqa: E402
from moejax.balance.policies import POLICIES  # noqa: E402
from moejax.config import (  # noqa: E402
    Config,
    Data,
    Dispatch,
    Model,
    Moe,
    Train,
)
from moejax.plan.layout import Split, Store, Topology, Transport  # noqa: E402
from moejax.plan.schedule_rules import SCHEDULES  # noqa: E402
from moejax.resolve.resolved import resolve  # noqa: E402
from tools.launch.arguments import HelpFormatter  # noqa: E402
from train.launch.program import DONE  # noqa: E402

BASE = Config(
    Topology(dc=2, expert=2, tensor=2),
    model=Model(d_model=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8),
    moe=Moe(num_experts=8, top_k=2, d_expert=32),
    dispatch=Dispatch(group="dc_expert", schedule="s1h"),
    data=Data(seq_len=8),
    train=Train(batch_size=16, loss_chunk=8),
)
OPTIONS: dict[str, tuple[Any, ...]] = {
    "Balance.policy": tuple(POLICIES),
    "Dispatch.store": get_args(Store),
    "Dispatch.split": get_args(Split),
    "Dispatch.schedule": tuple(SCHEDULES),
    "Dispatch.domain": ((2, 1), (1, 2), (2, 2)),
    "Dispatch.transport": [x for x in get_args(Transport) if x != "local"],
    "Dispatch.exchange": ("capacity",),
    "Dispatch.gather": ("step",),
    "Dispatch.prefetch": (True,),
    "Dispatch.compression": (1.5,),
    "Moe.halves": (True,),
}
"""Values that are tried, by option. 'local' transport is what one device has."""
COMPANIONS: dict[str, dict[str, Any]] = {
    "water_filling": {"Balance.policy": "micromoe"},
    "local": {"Dispatch.group": "expert"},
    "1.5": {"Dispatch.domain": (1, 2)},
}
"""Options with which a value is tried, unless the other one of a pair sets them."""
HEAD = """# What goes together

This page answers: which options of balancing and communication may I combine?

Any two values of these options go together, unless the table says why they do not.
`python tools/combinations.py` prints this page, and a test compares the two. It tries a
small model on eight devices (dc=2, expert=2, tensor=2). All other options are as by
default; the schedule is `'s1h'`. A run that combines what does not go together is
refused in one line, which says what to use instead.
"""


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=HelpFormatter
    ).parse_args(argv)
    print(page(), end="")
    return DONE


def configured(values: dict[str, Any]) -> Config:
    """Return the small configuration with these values of options."""
    cfg = BASE
    for name, value in values.items():
        part, field = name.split(".")
        part = part.lower()
        changed = dataclasses.replace(getattr(cfg, part), **{field: value})
        cfg = dataclasses.replace(cfg, **{part: changed})
    return cfg


def refusal(values: dict[str, Any]) -> str | None:
    """Return the line by which a run with these values is refused, or None."""
    types = (AxisType.Auto,) * len(AXES)
    try:
        cfg = configured(values)
        resolve(cfg, AbstractMesh(cfg.mesh.sizes, AXES, axis_types=types))
    except ValueError as fault:
        return str(fault)
    return None


def page() -> str:
    """Return the page of pairs that do not go together: a row for each rule and the
    values of two options that break it."""
    refused: dict[tuple[str, Any, str], dict[str, list]] = {}
    num_pairs = num_refused = 0
    for (one, ones), (other, others) in itertools.combinations(OPTIONS.items(), 2):
        for value, second in itertools.product(ones, others):
            num_pairs += 1
            companions = {**COMPANIONS.get(str(value), {})}
            companions |= COMPANIONS.get(str(second), {})
            line = refusal(companions | {one: value, other: second})
            if line is not None:
                num_refused += 1
                rules = refused.setdefault((one, value, other), {})
                rules.setdefault(_rule(line, value, second), []).append(second)
    rows: dict[tuple, list] = {}
    for (one, value, other), rules in refused.items():
        for rule, seconds in rules.items():
            rows.setdefault((one, other, tuple(seconds), rule), []).append(value)
    lines = [
        HEAD.strip(),
        "",
        f"{num_pairs - num_refused} of {num_pairs} pairs are accepted. "
        f"Of policy x schedule x domain, {num_triples()} are.",
        "",
        "| option | not with | why |",
        "|---|---|---|",
    ]
    for (one, other, seconds, rule), values in rows.items():
        lines.append(f"| {_named(one, values)} | {_named(other, seconds)} | {rule} |")
    return "\n".join(lines) + "\n"


def num_triples() -> str:
    """Return how many combinations of a policy, a schedule or no tensor axis, and a
    domain or none are accepted, of how many."""
    domains = ((1, 1), *OPTIONS["Dispatch.domain"])
    count, accepted = 0, 0
    for policy, schedule, domain in itertools.product(
        OPTIONS["Balance.policy"], ("auto", *OPTIONS["Dispatch.schedule"]), domains
    ):
        values = {"Balance.policy": policy, "Dispatch.domain": domain}
        values |= COMPANIONS.get(schedule, {}) | {"Dispatch.schedule": schedule}
        if schedule == "auto":
            values |= {"Mesh.expert": 4, "Mesh.tensor": 1}
        count, accepted = count + 1, accepted + (refusal(values) is None)
    return f"{accepted} of {count}"


def _named(option: str, values: Iterable) -> str:
    """Return an option and some of its values in Markdown."""
    return f"`{option}`: {', '.join(f'`{value!r}`' for value in values)}"


def _rule(line: str, *values: Any) -> str:
    """Return the part of a refusal before its advice, without the values of a pair, so
    that other values that break the same rule have the same one."""
    rule = line.split(": use ", maxsplit=1)[0]
    for value in values:
        rule = rule.replace(f"={value!r}", "").replace(f" is {value!r}", " is another")
    return rule


if __name__ == "__main__":
    raise SystemExit(main())
