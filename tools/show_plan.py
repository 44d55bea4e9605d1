"""Show an expert plan, and the device loads before and after it.

    python tools/show_plan.py --trace routing.npz --policy flexmoe
    python tools/show_plan.py --synthetic zipf:1.2 --policy eplb --devices 8
    python tools/show_plan.py --run runs/tiny_cpu --layer 2

`before` is the home plan. `after` is the plan that --policy makes from one sample, with
the load of the next sample. With --run, `after` is the plan of the run's newest
checkpoint, with the last load in its metrics. Slots are shown for one layer.
Exit codes: 0 done, 2 bad input.
"""

import argparse
import json
import math
import pathlib
import sys
from typing import NamedTuple

import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from moejax.balance.policies import POLICIES, check_policy  # noqa: E402
from moejax.perf import traffic  # noqa: E402
from moejax.perf.traffic import over_mean  # noqa: E402
from moejax.plan.expert_plan import ExpertPlan  # noqa: E402
from moejax.plan.groups import GROUP_AXES  # noqa: E402
from moejax.plan.layout import Split  # noqa: E402
from tools import replay  # noqa: E402
from tools.bench import expert_loads  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.checkpoint.record import newest_meta  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402
from train.logs.record_lines import read_records  # noqa: E402


class Shown(NamedTuple):
    """A plan, the loads under it, and where both come from."""

    policy: str
    source: str
    layers: tuple[int, ...]
    """Numbers of the layers in the model."""
    plan: ExpertPlan
    load_lwe: np.ndarray
    split: Split


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with guarded(as_json=args.json) as ending:
        return work(args)
    return ending.code


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    source = expert_loads.add_options(parser)
    source.add_argument(
        "--run",
        type=pathlib.Path,
        help="run directory of train/main.py with a checkpoint",
    )
    replay.add_layout_options(parser)
    add = parser.add_argument
    add(
        "--policy",
        default="flexmoe",
        help="policy that plans, with --trace or --synthetic",
    )
    add(
        "--sample",
        type=int,
        help="number of the sample to plan from (default: the middle one)",
    )
    add(
        "--layer",
        type=int,
        help="layer whose slots are shown (default: the least even one before)",
    )
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    shown = from_run(args.run) if args.run else from_loads(args)
    plan, layers = shown.plan, shown.layers
    if args.layer is not None and args.layer not in layers:
        raise ValueError(
            f"--layer {args.layer} does not exist: use one of "
            f"{', '.join(map(str, layers))}"
        )
    home = ExpertPlan.home(plan.num_layers, plan.num_experts)
    before_lw = over_mean(device_rows(home, shown.load_lwe, "even"))
    after_lw = over_mean(device_rows(plan, shown.load_lwe, shown.split))
    before_l, after_l = before_lw.max(axis=1), after_lw.max(axis=1)
    worst = layers[int(np.argmax(before_l))]
    index = layers.index(worst if args.layer is None else args.layer)
    title = (
        f"{shown.policy} plan {plan.digest}: device max/mean {before_l[index]:.2f} -> "
        f"{after_l[index]:.2f} in layer {layers[index]}"
    )
    print(f"{title}\n{shown.source}\nlayer  device max/mean before  after")
    for layer, before, after in zip(layers, before_l, after_l):
        print(f"{layer:5d}{before:24.2f}{after:7.2f}")
    print(f"\nlayer {layers[index]}: load / mean of each device")
    print("device  before  after  experts in its slots (* has replicas, - is empty)")
    row_p = plan.slot_to_expert_lp[index]
    num_replicas_e = np.bincount(row_p[row_p >= 0]).tolist()
    words_p = [
        "-" if e < 0 else f"{e}*" if num_replicas_e[e] > 1 else f"{e}" for e in row_p
    ]
    words_ws = np.reshape(words_p, (len(before_lw[index]), -1))
    for device, words_s in enumerate(words_ws):
        before, after = before_lw[index, device], after_lw[index, device]
        print(f"{device:6d}{before:8.2f}{after:7.2f}  {' '.join(words_s)}")
    record = {
        "title": title,
        "source": shown.source,
        "digest": plan.digest,
        "layers": list(layers),
        "device_max_over_mean_before": before_l.tolist(),
        "device_max_over_mean_after": after_l.tolist(),
        "plan": json.loads(plan.to_json()),
    }
    emit(record, args.json)
    return DONE


def from_loads(args: argparse.Namespace) -> Shown:
    """Return the plan that --policy makes from one sample of the loads. The policy
    starts from the home plan."""
    check_policy(args.policy)  # before the loads, which take longer
    loads = expert_loads.from_options(args)
    (num_samples, *_, num_experts) = loads.load_tlwe.shape
    sample = num_samples // 2 if args.sample is None else args.sample
    if not 0 <= sample < num_samples:
        raise ValueError(f"--sample {sample} must be one of 0 to {num_samples - 1}")
    scored = min(sample + 1, num_samples - 1)
    policy = replay.find_policy(args.policy, loads, args)
    layout = replay.layout_for(policy, num_experts, args)
    cost, current = replay.cost_model(args), ExpertPlan.home_in(layout, 1)
    plans = [
        policy.plan(load_we[None], layout, cost, current)
        for load_we in loads.load_tlwe[sample]
    ]
    rows_lp = np.concatenate([plan.slot_to_expert_lp for plan in plans])
    owned_le = np.concatenate([plan.owned_le for plan in plans])
    plan = ExpertPlan(rows_lp, num_experts, owned_le).validate(layout)
    source = f"{loads.name}, planned from sample {sample}, load of sample {scored}"
    load_lwe = loads.load_tlwe[scored]
    return Shown(args.policy, source, loads.layers, plan, load_lwe, layout.split)


def from_run(run: pathlib.Path) -> Shown:
    """Return the plan of a run's newest checkpoint, with the last load in its metrics.

    metrics.jsonl holds a step's load of each expert summed over devices: each source
    device is given an even share of it.
    """
    meta = newest_meta(run / "checkpoints")
    if meta is None:
        raise ValueError(
            f"{run} has no complete checkpoint: give the directory of a run that has "
            "saved one"
        )
    plan = ExpertPlan.from_json(meta["plan"])
    group = GROUP_AXES[meta["config"]["dispatch"]["group"]]
    devices = math.prod(meta["config"]["mesh"][axis] for axis in group)
    policy = meta["config"]["balance"]["policy"]
    split = POLICIES[policy].split if policy in POLICIES else "even"
    split = meta["config"]["dispatch"]["split"] or split
    step, tokens_le = read_loads(run / "metrics.jsonl")
    if tokens_le.shape != (plan.num_layers, plan.num_experts):
        raise ValueError(
            f"{run}: the loads of step {step} have shape {list(tokens_le.shape)}, but "
            f"the plan has {plan.num_layers} layers and {plan.num_experts} experts"
        )
    load_lwe = np.repeat(tokens_le[:, None] / devices, devices, axis=1)
    source = f"{run.resolve().name}, newest checkpoint, load of step {step}"
    layers = tuple(range(plan.num_layers))
    return Shown(policy, source, layers, plan, load_lwe, split)


def read_loads(path: pathlib.Path) -> tuple[int, np.ndarray]:
    """Return the last step with loads, and its loads [l, e]. Raises ValueError if no
    loads were recorded."""
    step, tokens_le = None, None
    for record in read_records(path):
        table_le = _table(record.get("tokens_le"))
        if table_le is not None:
            step, tokens_le = record["step"], table_le
    if step is None:
        raise ValueError(
            f"{path} holds no tokens_le: continue the run for at least "
            "Train.log_load_every_steps steps"
        )
    return step, tokens_le


def _table(table) -> np.ndarray | None:
    """Return a table of loads as an array; None if it is none, as in a damaged line."""
    try:
        load_le = np.asarray(table, np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    is_table = load_le.ndim == 2 and load_le.size
    is_load = np.isfinite(load_le) & (load_le >= 0)
    return load_le if is_table and is_load.all() else None


def device_rows(plan: ExpertPlan, load_lwe: np.ndarray, split: Split) -> np.ndarray:
    """Return the rows that each device computes, [l, w]."""
    devices = load_lwe.shape[1]
    pairs = zip(load_lwe, plan.slot_to_expert_lp)
    rows = [traffic.rows_by_slot(we, row_p, devices, split) for we, row_p in pairs]
    return np.stack([traffic.device_rows(rows_wp) for rows_wp in rows])


if __name__ == "__main__":
    sys.exit(main())
