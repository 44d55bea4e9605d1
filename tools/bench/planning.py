"""Time how long the planner's process holds the training loop, and how long it plans.

    python tools/bench/planning.py --policy flexmoe --policy micromoe --json

No model runs: a step is a sleep, after which its counts go to the process and, at the
steps of decisions, the reply is collected, as in train/balance/balancing.py. By layer,
experts have loads like 1, 1/2, 1/3 .. in an order that changes every 15 steps. The same
events are taken in this process afterwards, which times the plans themselves. Exit
codes: 0 done, 2 bad input, 3 the machine failed.
"""

import argparse
import pathlib
import sys
import time

import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from moejax.balance import adoptions, controller, planning  # noqa: E402
from moejax.balance.adoptions import Adoptions  # noqa: E402
from moejax.balance.planning import (  # noqa: E402
    Adopted,
    Observed,
    Planner,
    Snapshot,
    Task,
)
from moejax.balance.policies import POLICIES, make_valid_plan  # noqa: E402
from moejax.balance.settings import Settings  # noqa: E402
from moejax.config import Balance  # noqa: E402
from moejax.perf.cost_model import NOTES  # noqa: E402
from moejax.plan.expert_plan import ExpertPlan  # noqa: E402
from moejax.plan.layout import Layout  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.balance.planner_process import PlannerProcess  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402

ROWS = 2**15
"""Choices of one device in a step and layer."""
STEPS_OF_A_LOAD = 15


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with guarded(as_json=args.json) as ending:
        return work(args)
    return ending.code


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    names = [name for name in POLICIES if name != "home"]
    add("--policy", action="append", choices=names, help="(default: all but home)")
    add("--devices", type=int, default=64, help="devices of the group")
    add("--experts", type=int, default=256, help="experts of a layer")
    add("--layers", type=int, default=32, help="MoE layers")
    add("--steps", type=int, default=45, help="number of steps")
    add("--step_sec", type=float, default=1.0, help="time of a step in seconds")
    add("--lag_steps", type=int, default=4, help="Balance.lag_steps")
    args = parser.parse_args(argv)
    args.policy = args.policy or names
    return args


def work(args: argparse.Namespace) -> int:
    if args.experts % args.devices:
        raise ValueError(
            f"--experts {args.experts} must be a multiple of --devices {args.devices}"
        )
    results = {}
    for name in args.policy:
        task, snapshot = make_planner(name, args)
        results[name] = time_loop(task, snapshot, args)
        results[name]["plan_sec"] = time_plans(task, snapshot.planner, args)
        print(f"{name:<10} {results[name]}", flush=True)
    emit({"policies": results}, args.json)
    return DONE


def make_planner(name: str, args: argparse.Namespace) -> tuple[Task, Snapshot]:
    """Return what the planner of a policy has to know, and its first snapshot."""
    policy, own = POLICIES[name], args.experts // args.devices
    store = policy.stores[0]
    replicates = store != "owned"
    has_budgets = store in ("resident", "transient")
    layout = Layout.home(
        args.experts,
        args.devices,
        ROWS,
        slots_per_device=own + replicates,
        store=store,
        split=policy.split if replicates else "even",
        offers_per_device=2 * has_budgets,
        copies_per_device=1 * has_budgets,
        prefetch=policy.prefetches(store),
    )
    balance = Balance(policy=name, lag_steps=args.lag_steps)
    settings = Settings.of(balance, 2 * own + 2, policy.stores)
    plan = ExpertPlan.home_in(layout, args.layers)
    if policy.is_spread_first:
        zero_lwe = np.zeros((args.layers, args.devices, args.experts))
        plan = make_valid_plan(name, policy, zero_lwe, layout, NOTES, plan)
    state = controller.init(settings, layout, plan, args.layers)
    sizes = {"dc": 1, "data": 1, "expert": args.devices}
    task = Task(settings, NOTES, sizes, planning.make_home_layout(layout))
    return task, Snapshot(Planner(state))


def counts(step: int, args: argparse.Namespace) -> Observed:
    """Return the counts of a step. In each layer experts have loads like 1, 1/2, 1/3
    .. in an order that changes every STEPS_OF_A_LOAD steps."""
    share_e = 1 / np.arange(1, args.experts + 1)
    share_e /= share_e.sum()
    rng = np.random.default_rng(step // STEPS_OF_A_LOAD)
    share_le = np.stack([rng.permutation(share_e) for _ in range(args.layers)])
    rng = np.random.default_rng([step, 1])
    tokens_lwe = rng.multinomial(ROWS, share_le[:, None].repeat(args.devices, 1))
    pair_l = np.full(args.layers, ROWS // args.devices, np.int32)
    return Observed(step, tokens_lwe.astype(np.int32), pair_l)


def time_loop(task: Task, snapshot: Snapshot, args: argparse.Namespace) -> dict:
    """Return for how long the planner's process holds a loop at a step, in milliseconds
    by `observe` and `collect`, and how long the loop waits for late plans, in
    seconds."""
    state, settings = snapshot.planner.state, task.settings
    now = Adoptions(state.layout, state.plan, (), None)
    process = PlannerProcess(task, snapshot)
    observe_msec, collect_msec, wait_sec, kinds = [], [], [], []
    for step in range(1, args.steps + 1):
        asked = step - args.lag_steps
        if asked > 0 and adoptions.is_asked(settings, now, asked):
            begin_sec = time.monotonic()
            reply, waited_sec = process.collect(asked)
            decision = reply.decision
            now = adoptions.pend(settings, now, decision)
            if decision is not None:
                decision.line()
                decision.record()
            took_sec = time.monotonic() - begin_sec - waited_sec
            collect_msec.append(1e3 * took_sec)
            wait_sec.append(waited_sec)
            kinds.append(decision.kind if decision else "none")
        if adoptions.is_due(now, step):
            now = adoptions.adopt(now)
            process.tell(Adopted())
        event = counts(step, args)
        time.sleep(args.step_sec)
        begin_sec = time.monotonic()
        process.observe(event.step, event.tokens_lwe, event.fullest_pair_l)
        observe_msec.append(1e3 * (time.monotonic() - begin_sec))
    begin_sec = time.monotonic()
    process.snapshot()
    snapshot_sec = time.monotonic() - begin_sec
    process.close()
    if not kinds:
        raise ValueError(f"--steps {args.steps}: no plan was due before the end")
    return {
        "observe_msec": _spread(observe_msec[1:]),
        "collect_msec": _spread(collect_msec),
        "plan_wait_sec": [round(x, 3) for x in wait_sec],
        "kinds": kinds,
        "snapshot_sec": round(snapshot_sec, 3),
    }


def time_plans(task: Task, planner: Planner, args: argparse.Namespace) -> list[float]:
    """Return how long the plans themselves take, in seconds, in this process."""
    plan_sec = []
    for step in range(1, args.steps + 1):
        if adoptions.is_due(planner.state, step):
            planner, _ = planning.take(task, planner, Adopted())
        event = counts(step, args)
        begin_sec = time.monotonic()
        planner, reply = planning.take(task, planner, event)
        if reply is not None:
            plan_sec.append(round(time.monotonic() - begin_sec, 3))
    return plan_sec


def _spread(times: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum."""
    median, p99 = np.percentile(times, [50, 99])
    figures = {"median": median, "p99": p99, "max": max(times)}
    return {name: round(float(x), 3) for name, x in figures.items()}


if __name__ == "__main__":
    sys.exit(main())
