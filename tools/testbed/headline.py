"""The parts of `tools/testbed/run.py headline`: each measures a claim or two.

A part takes Options and returns a dict with its figures; keys of all parts stand in
one record. A part says on stderr how it gets on.
"""

from collections.abc import Callable

from tools.testbed.balancer import Options, balancer
from tools.testbed.links import domains, schedules, selector

PARTS: dict[str, Callable[[Options], dict]] = {
    "balancer": balancer,
    "domains": domains,
    "schedules": schedules,
    "selector": selector,
}


def headline(only: str, options: Options) -> dict:
    """The record of the parts named in `only`, commas between; 'all' is all.

    Raises ValueError for one that there is not.
    """
    names = list(PARTS) if only == "all" else [x.strip() for x in only.split(",")]
    for name in names:
        if name not in PARTS:
            raise ValueError(f"--only {name} is no part: choose of {', '.join(PARTS)}")
    record = {}
    for name in names:
        record |= PARTS[name](options)
    return record
