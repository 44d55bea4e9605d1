"""Settings of the balancer of one run, and the policy that they name."""

import dataclasses

from moejax.balance.policies import POLICIES, Policy, check_policy
from moejax.config import Balance
from moejax.plan.layout import Layout, Store


@dataclasses.dataclass(frozen=True)
class Settings(Balance):
    """`Balance` of one run, in which max_slots_per_device is a number.

    Making one raises ValueError, which names the field, for a setting that is wrong.
    """

    stores: tuple[Store, ...] | None = None
    """Stores that the model can have; None: all stores of the policy."""
    num_steps: int | None = None
    """Last step of the run, by which a relayout must be adopted; None: no last step is
    known."""
    num_expert_groups: int = 1
    """Number of groups of consecutive experts among which the router chooses first
    (Router.num_groups), each of which 'eplb' keeps on one node."""
    ways: tuple[Layout, ...] = ()
    """Layouts of the run's first step under each communication schedule and domain that
    it leaves to be chosen; a relayout may change to those of another one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_policy(self.policy)
        if self.max_slots_per_device is None:
            raise ValueError("Balance.max_slots_per_device=None must be a number here")
        self._check_options()
        if self.policy != "home" and not find_policy(self).stores:
            raise ValueError(
                f"Balance.policy='{self.policy}' plans for the stores "
                f"{', '.join(POLICIES[self.policy].stores)}, and this run can have "
                f"{', '.join(self.stores or ())}: use another Dispatch.store, policy, "
                "or Moe.d_expert that data x expert devices divide"
            )

    def _check_options(self) -> None:
        """Raise ValueError for an option of another policy."""
        for field in dataclasses.fields(Balance):
            takers = [
                n for n, policy in POLICIES.items() if field.name in policy.options
            ]
            value = getattr(self, field.name)
            if takers and self.policy not in takers and value != field.default:
                raise ValueError(
                    f"Balance.{field.name}={value} is an option of policy "
                    f"{' and '.join(takers)}, not of '{self.policy}': use "
                    f"{field.default}, or another Balance.policy"
                )

    @classmethod
    def of(
        cls,
        balance: Balance,
        max_slots_per_device: int,
        stores: tuple[Store, ...],
        num_steps: int | None = None,
        num_expert_groups: int = 1,
        ways: tuple[Layout, ...] = (),
    ) -> "Settings":
        """Return the settings of a run of this many steps, with this limit on slots,
        these stores, groups of experts and ways to communicate."""
        return cls(
            **dataclasses.asdict(balance)
            | {
                "max_slots_per_device": max_slots_per_device,
                "stores": stores,
                "num_steps": num_steps,
                "num_expert_groups": num_expert_groups,
                "ways": ways,
            }
        )


def find_policy(settings: Settings) -> Policy:
    """Return the policy with its options, and with only those of its stores that the
    model can have."""
    policy = POLICIES[settings.policy].with_options(settings)
    if settings.stores is None:
        return policy
    stores = tuple(s for s in policy.stores if s in settings.stores)
    return dataclasses.replace(policy, stores=stores)
