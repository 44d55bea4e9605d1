"""Settings of the balancer of one run, and the policy that they name."""

import dataclasses

from moejax.balance.methods import Method
from moejax.balance.policies import AUTO, POLICIES, Policy, check_policy
from moejax.config import Balance
from moejax.plan.layout import Layout, Store

RELAYOUT_LAG_STEPS = 50
"""Balance.relayout_lag_steps where it is None and the policy is not 'auto', or no
compilation was measured."""


@dataclasses.dataclass(frozen=True)
class Settings(Balance):
    """`Balance` of one run, in which max_slots_per_device is a number, and but for
    policy 'auto' relayout_lag_steps too.

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
    methods: tuple[Method, ...] = ()
    """With policy 'auto': the methods that the run can have, of which the first is that
    of the start; a relayout may change to another one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy == AUTO:
            assert self.methods, "there is a method of the start"
        else:
            check_policy(self.policy)
        if self.max_slots_per_device is None:
            raise ValueError("Balance.max_slots_per_device=None must be a number here")
        self._check_options()
        is_named = self.policy not in ("home", AUTO)
        if is_named and not find_policy(self, self.policy).stores:
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
            is_taken = self.policy == AUTO or self.policy in takers
            if takers and not is_taken and value != field.default:
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
        methods: tuple[Method, ...] = (),
    ) -> "Settings":
        """Return the settings of a run of this many steps, with this limit on slots,
        these stores, groups of experts, ways to communicate and methods."""
        relayout_lag_steps = balance.relayout_lag_steps
        if relayout_lag_steps is None and balance.policy != AUTO:
            relayout_lag_steps = max(RELAYOUT_LAG_STEPS, balance.lag_steps + 1)
        return cls(
            **dataclasses.asdict(balance)
            | {
                "relayout_lag_steps": relayout_lag_steps,
                "max_slots_per_device": max_slots_per_device,
                "stores": stores,
                "num_steps": num_steps,
                "num_expert_groups": num_expert_groups,
                "ways": ways,
                "methods": methods,
            }
        )

    @property
    def first_policy(self) -> str:
        """Name of the policy of the first step."""
        return self.methods[0].policy if self.policy == AUTO else self.policy


def find_policy(settings: Settings, name: str) -> Policy:
    """Return a policy with its options, and with only those of its stores that the
    model can have."""
    policy = POLICIES[name].with_options(settings)
    if settings.stores is None:
        return policy
    stores = tuple(s for s in policy.stores if s in settings.stores)
    return dataclasses.replace(policy, stores=stores)
