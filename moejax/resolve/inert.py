"""Find parts of a configuration that cannot have an effect in its run."""

from moejax.config import Config

LOSSES = (
    "balance_loss",
    "sequence_balance_loss",
    "mutual_information_loss",
)
"""Weights of the auxiliary losses that even out the load of experts."""


def inert_parts(cfg: Config) -> list[str]:
    """Return a line for each part of a configuration that can have no effect: what it
    is, why, and how to change that.

    These configurations run, and compute what they say. But nobody would write one on
    purpose, except to load a published model that was made so.
    """
    router, train, balance = cfg.router, cfg.train, cfg.balance
    lines = []
    chooses = router.kind != "recorded"
    is_sparse = router.training == "sparse"
    if cfg.moe.top_k == 1 and router.normalise_gates and chooses and is_sparse:
        lines.append(
            "with Moe.top_k = 1 and Router.normalise_gates = True every gate is the "
            "same number: the router learns nothing from the model's loss; set "
            "Router.normalise_gates = False"
        )
    if chooses and not router.bias_rate and not any(getattr(router, x) for x in LOSSES):
        names = ", ".join(f"Router.{name}" for name in (*LOSSES, "bias_rate"))
        lines.append(
            f"{names} are all 0: nothing trains the router to load its experts evenly; "
            "set one of them"
        )
    axis, *inner = cfg.dispatch.group_axes
    nodes, groups = getattr(cfg.mesh, axis), router.num_groups
    is_limited = chooses and router.top_groups < groups
    if is_limited and inner and groups % nodes:
        lines.append(
            f"Router.top_groups={router.top_groups} of {groups} groups does not limit "
            f"the links that a token crosses along Mesh.{axis}={nodes}: groups lie "
            f"across them; let Router.num_groups be a multiple of {nodes}"
        )
    if cfg.optimizer.warmup_steps >= train.num_steps:
        lines.append(
            f"Optimizer.warmup_steps={cfg.optimizer.warmup_steps} lasts as long as "
            f"Train.num_steps={train.num_steps}: the learning rate reaches its peak at "
            "the end, and never falls; use fewer"
        )
    first_adoption = balance.every_steps + balance.lag_steps
    if balance.policy not in ("home", "auto") and first_adoption > train.num_steps:
        lines.append(
            f"Balance.policy='{balance.policy}' decides at step {balance.every_steps} "
            f"first, for step {first_adoption}, and the run has Train.num_steps="
            f"{train.num_steps}: no plan changes; use a smaller Balance.every_steps"
        )
    return [f"inert              {line}" for line in lines]
