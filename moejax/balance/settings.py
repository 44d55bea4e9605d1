"""When the balancer asks, what it asks for, and which policy it asks."""

import dataclasses

from moejax.balance.policies import POLICIES, Policy, check_policy
from moejax.plan.layout import Store


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of one run; ValueError names a wrong field."""

    policy: str
    every_steps: int
    """Decisions are taken at multiples of it."""
    lag_steps: int
    """From a decision to its adoption, on every process."""
    act_above: float
    rest_below: float
    margin: float
    """Share of the time of what changes that a change must save."""
    cooldown_steps: int
    """From an adoption to the next decision."""
    horizon_steps: int
    """For so long a gain is counted."""
    half_life_steps: float
    max_slots_per_device: int
    relayout_lag_steps: int | None = None
    """From the decision for another layout to its adoption, which waits for a compile;
    None: lag_steps."""
    stores: tuple[Store, ...] | None = None
    """That this model can have; None: all of the policy's."""

    def __post_init__(self) -> None:
        check_policy(self.policy)
        for name, least in (
            ("every_steps", 1), ("lag_steps", 2), ("rest_below", 1), ("margin", 0),
            ("cooldown_steps", 0), ("horizon_steps", 1), ("half_life_steps", 1),
            ("max_slots_per_device", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"Balance.{name}={value} must be at least {least}")
        if not self.rest_below < self.act_above:
            raise ValueError(
                f"Balance.rest_below={self.rest_below} must be below "
                f"act_above={self.act_above}: the balancer acts above the one and "
                "rests below the other"
            )
        if not self.margin < 1:
            raise ValueError(
                f"Balance.margin={self.margin} must be below 1: it is the share of a "
                "step's time that a change must save"
            )
        if (self.relayout_lag_steps or self.lag_steps) < self.lag_steps:
            raise ValueError(
                f"Balance.relayout_lag_steps={self.relayout_lag_steps} must be at "
                f"least lag_steps={self.lag_steps}: a relayout has to be compiled too"
            )

        if self.policy != "home" and not policy_of(self).stores:
            raise ValueError(
                f"Balance.policy='{self.policy}' plans for the stores "
                f"{', '.join(POLICIES[self.policy].stores)}, and this run can have "
                f"{', '.join(self.stores or ())}: use another Dispatch.store, "
                "policy, or "
                "Moe.d_expert that data x expert devices divide"
            )


def policy_of(settings: Settings) -> Policy:
    """The policy, with those of its stores that the model can have."""
    policy = POLICIES[settings.policy]
    if settings.stores is None:
        return policy
    stores = tuple(s for s in policy.stores if s in settings.stores)
    return dataclasses.replace(policy, stores=stores)
