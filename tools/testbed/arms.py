"""Arms of the race: settings that make a configuration follow a published system.

All arms share one configuration. An arm adds the settings of its policy, and no other:
how often it plans, which store and split it uses. Each arm that replicates has the
slots of the budget, SPARE_SHARE more than its own experts.
"""

import dataclasses
import itertools
import math

from moejax.config import Config

SPARE_SHARE = 0.5
"""Slots of a device beyond its own experts, over its own experts."""
SLOTS = (
    "Dispatch.slots_per_device = {slots}",
    "Balance.max_slots_per_device = {slots}",
)
COPIES = (
    *SLOTS,
    "Dispatch.copies_per_device = {spare}",
    "Dispatch.offers_per_device = 1",
)
ONE_COPY = (
    "Dispatch.slots_per_device = {one_more}",
    "Balance.max_slots_per_device = {one_more}",
    "Dispatch.copies_per_device = 1",
    "Dispatch.offers_per_device = 1",
)
"""Budgets of arms whose split evens rows exactly over overlapping replicas. What a
layout may send is sent, whether a plan uses it or not."""
TWO_OFFERS = ("Dispatch.offers_per_device = 2",)
"""Budget of arms that choose copies in the step, where an owner of two hot experts must
give both."""
EVEN_FACTOR = 1.25
EVEN_BUFFERS = (f"Dispatch.buffer_factor = {EVEN_FACTOR}",)
"""Buffers of arms whose replicas share the rows of every source. The others keep the
configuration's, which hold the fullest pair of devices under home."""
EXACT_BUFFERS = ("Dispatch.buffer_factor = 1.0625",)
"""Buffers of arms whose split evens the rows of every source exactly, but for rounding:
at most 1.03 times the even share of a pair in 60 steps of the recorded load."""
STAYING_ROWS = (*EVEN_BUFFERS, "Dispatch.home_chunks = {home_chunks}")
"""Buffers of arms whose shadows keep rows on their device: as many chunks as hold all
rows of a device."""
EACH_STEP = (
    "Balance.every_steps = 1",
    "Balance.lag_steps = 1",
    "Balance.cooldown_steps = 0",
    "Balance.half_life_steps = 1.0",
    "Balance.act_above = 1.05",
    "Balance.rest_below = 1.01",
)
"""Settings of a system that plans each iteration from the loads of the last one."""
LAER = ("Balance.half_life_steps = 3.0",)
"""LAER-MoE plans from the loads of the last five iterations."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """One arm of the race."""

    params: tuple[str, ...] = ()
    """Gin bindings beside those of the configuration, with {slots}, {spare},
    {one_more} and {home_chunks}."""
    changes_function: bool = False
    """Whether its losses are others than exact home's: it drops rows, or follows
    another load."""


def _arm(policy: str, store: str, *groups: tuple[str, ...]) -> Arm:
    """Return an arm that balances by a policy, with groups of further bindings."""
    first = (f"Balance.policy = '{policy}'", f"Dispatch.store = '{store}'")
    return Arm(first + tuple(itertools.chain(*groups)))


ARMS: dict[str, Arm] = {
    "forced": Arm(
        ("Recorded.source = 'uniform'", "Dispatch.buffer_factor = 1.0"),
        changes_function=True,
    ),
    "home": Arm(),
    "capacity": Arm(
        ("Dispatch.exchange = 'capacity'", "Dispatch.buffer_factor = 1.0"),
        changes_function=True,
    ),
    "fastermoe_now": Arm(
        ("Dispatch.split = 'shadow'", *COPIES, *TWO_OFFERS, *STAYING_ROWS)
    ),
    "fastermoe": _arm("fastermoe", "transient", COPIES, STAYING_ROWS, EACH_STEP),
    "smartmoe": _arm("smartmoe", "owned"),
    "flexmoe": _arm("flexmoe", "resident", COPIES, EVEN_BUFFERS),
    "flexmoe_migrate": _arm(
        "flexmoe", "resident", COPIES, EVEN_BUFFERS, ("Balance.sends_states = True",)
    ),
    "prophet": _arm("prophet", "transient", COPIES, STAYING_ROWS),
    "prophet_every": _arm("prophet", "transient", COPIES, STAYING_ROWS, EACH_STEP),
    "eplb": _arm("eplb", "sharded", SLOTS, EVEN_BUFFERS),
    "laer": _arm("laer", "sharded", SLOTS, EVEN_BUFFERS, EACH_STEP, LAER),
    "micromoe": _arm("micromoe", "resident", ONE_COPY, EXACT_BUFFERS),
    "dynamic": Arm(
        ("Dispatch.split = 'dynamic'", *ONE_COPY, *TWO_OFFERS, *EXACT_BUFFERS)
    ),
}
"""Arms by name, in the order in which they are run."""
CEILING, BASELINE = "forced", "home"
AT_JUMPS = ("forced", "home", "flexmoe", "prophet", "micromoe", "dynamic")
"""Arms that are run by default on synthetic loads."""


def names(text: str | None, load: str) -> list[str]:
    """Return the arms that `text` names, with commas between, in the order of ARMS.
    None: those that are run by default on a load.

    Raises ValueError for an arm that does not exist.
    """
    if text is None:
        return list(ARMS if load == "recorded" else AT_JUMPS)
    chosen = [name.strip() for name in text.split(",")]
    for name in chosen:
        if name != "all" and name not in ARMS:
            raise ValueError(f"--arms {name} is not an arm: use {', '.join(ARMS)}")
    return [name for name in ARMS if name in chosen or "all" in chosen]


def params(name: str, cfg: Config) -> list[str]:
    """Return the gin bindings of an arm for a configuration of this size."""
    own, slots = cfg.moe.num_experts // cfg.mesh.expert, num_slots(cfg)
    numbers = {
        "slots": slots,
        "spare": slots - own,
        "one_more": own + 1,
        "home_chunks": math.ceil(cfg.mesh.expert / EVEN_FACTOR),
    }
    return [text.format(**numbers) for text in ARMS[name].params]


def num_slots(cfg: Config) -> int:
    """Return the slots of a device of an arm that replicates."""
    own = cfg.moe.num_experts // cfg.mesh.expert
    return own + max(1, round(SPARE_SHARE * own))
