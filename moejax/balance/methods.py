"""Methods of balancing: a policy, with the store and the split in which it runs.

A run whose policy is 'auto' changes from one method to another, by relayouts. Their
times are predicted by the cost model; where several are near the best, the race
decides, in which all ran on a clock (docs/race.md).
"""

import dataclasses
from collections.abc import Mapping

from moejax.plan.layout import Layout
from moejax.plan.layout_checks import GATHERED_ONCE

RACE = (
    "dynamic", "micromoe", "flexmoe", "eplb", "laer", "fastermoe", "shadow", "prophet",
    "smartmoe",
)  # fmt: skip
"""Policies, and splits that make the replicas of policy 'home', from the fastest to the
slowest of the race. 'hiermoe' did not run."""
NEAR = 0.05
"""Share of the least time by which a method may be slower and still count as near
it."""
MIN_GAIN = 0.05
"""Smallest share of the time of MoE layers that a change of the method must save. A
cost model that is right to a few per cent must not choose between equal methods."""
FIELDS = (
    "store", "split", "slots_per_device", "offers_per_device", "copies_per_device",
    "offers_per_node", "copies_per_node", "shadow_price", "exchange_toll",
    "top_up_slack", "top_up_copies", "top_up_offers",
)  # fmt: skip
"""Fields of a layout that belong to its method. Communication schedule and domain do
not: they stay when the method changes. Buffers are fitted to its plan."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A policy in a store, with a split."""

    policy: str
    layout: Layout
    """Layout in which a run of this method starts."""

    def __str__(self) -> str:
        layout = self.layout
        split = f" with split {layout.split}, copies: {layout.copies_per_device}"
        return f"{self.policy} in store {layout.store}{split * layout.makes_replicas}"

    def is_in_use(self, policy: str, layout: Layout) -> bool:
        """Return whether a run with this policy and layout uses the method."""
        same = layout.store == self.layout.store and layout.split == self.layout.split
        return policy == self.policy and same

    def applied(self, now: Layout) -> Layout:
        """Return the layout of the run `now` with this method. Raises ValueError where
        they do not go together, as with other domains."""
        fields = {name: getattr(self.layout, name) for name in FIELDS}
        keeps_slots = self.layout.store in GATHERED_ONCE or self.layout.makes_replicas
        gather = now.gather if keeps_slots else "layer"
        prefetch = self.layout.prefetch if now.domain is None else now.prefetch
        return dataclasses.replace(
            now, **fields, gather=gather, prefetch=prefetch and gather == "layer"
        )


def first_of_the_race(sec: Mapping[Method, float]) -> Method:
    """Return the method to take, of those with predicted seconds: home if it is near
    the fastest, else the first of the race among those that are."""
    min_sec = min(sec.values())
    near = [method for method in sec if sec[method] <= (1 + NEAR) * min_sec]
    return min(near, key=lambda method: (_place(method), sec[method]))


def _place(method: Method) -> tuple[bool, int]:
    """Return the place of a method in the race, the last one for a policy that was not
    in it. Rows that stay at shadows need room, so that methods whose layout has none
    come behind all others."""
    layout = method.layout
    name = layout.split if layout.makes_replicas else method.policy
    stays = layout.split in ("local_first", "shadow") and not layout.keeps_home_rows
    if name == "home":
        return False, -1
    return stays, RACE.index(name) if name in RACE else len(RACE)
