"""Show an expert plan and the device loads before and after it, as a picture and text.

    python tools/show_plan.py --trace routing.npz --policy flexmoe --out plan.png
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
from moejax.plan.layout import GROUP_AXES, Split  # noqa: E402
from tools import replay  # noqa: E402
from tools.bench import expert_loads  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from tools.plots.plan_picture import Comparison, draw  # noqa: E402
from train.checkpoint.record import newest_meta  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402
from train.logs.record_lines import read_records  # noqa: E402

MAX_DECISIONS = 8
BAR_WIDTH = 24


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
    add("--out", type=pathlib.Path, help="file of the picture (default: plan.png)")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    comparison, lines = from_run(args) if args.run else from_loads(args)
    out = args.out or pathlib.Path("plan.png")
    say(comparison)
    for line in lines:
        print(line)
    draw(comparison).savefig(out, dpi=110, pil_kwargs={"optimize": True})
    print(f"{out}  {out.stat().st_size / 1e3:.0f} kB")
    emit(make_record(comparison, out), args.json)
    return DONE


def from_loads(args: argparse.Namespace) -> tuple[Comparison, list[str]]:
    """Return the plan that --policy makes from one sample of the loads, compared with
    the home plan, and no further lines. The policy starts from the home plan."""
    check_policy(args.policy)  # before the loads, which take longer
    loads = expert_loads.from_options(args)
    (num_samples, *_, num_experts) = loads.load_tlwe.shape
    sample = num_samples // 2 if args.sample is None else args.sample
    if not 0 <= sample < num_samples:
        raise ValueError(f"--sample {sample} must be one of 0 to {num_samples - 1}")
    shown = min(sample + 1, num_samples - 1)
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
    source = f"{loads.name}, planned from sample {sample}, load of sample {shown}"
    load_lwe = loads.load_tlwe[shown]
    names = PlanSource(args.policy, source, loads.layers)
    return compare(names, plan, load_lwe, layout.split, args.layer), []


def from_run(args: argparse.Namespace) -> tuple[Comparison, list[str]]:
    """Return the plan of a run's newest checkpoint, compared with the home plan, and a
    line for each of the last decisions.

    metrics.jsonl holds a step's load of each expert summed over devices: each source
    device is given an even share of it.
    """
    meta = newest_meta(args.run / "checkpoints")
    if meta is None:
        raise ValueError(
            f"{args.run} has no complete checkpoint: give the directory of a run that "
            "has saved one"
        )
    plan = ExpertPlan.from_json(meta["plan"])
    group = GROUP_AXES[meta["config"]["dispatch"]["group"]]
    devices = math.prod(meta["config"]["mesh"][axis] for axis in group)
    policy = meta["config"]["balance"]["policy"]
    split = POLICIES[policy].split if policy in POLICIES else "even"
    split = meta["config"]["dispatch"]["split"] or split
    step, tokens_le, decisions = read_metrics(args.run / "metrics.jsonl")
    if tokens_le.shape != (plan.num_layers, plan.num_experts):
        raise ValueError(
            f"{args.run}: the loads of step {step} have shape {list(tokens_le.shape)}, "
            f"but the plan has {plan.num_layers} layers and {plan.num_experts} experts"
        )
    load_lwe = np.repeat(tokens_le[:, None] / devices, devices, axis=1)
    source = f"{args.run.resolve().name}, newest checkpoint, load of step {step}"
    names = PlanSource(policy, source, tuple(range(plan.num_layers)))
    comparison = compare(names, plan, load_lwe, split, args.layer)
    return comparison, [decision_line(record) for record in decisions[-MAX_DECISIONS:]]


def read_metrics(path: pathlib.Path) -> tuple[int, np.ndarray, list[dict]]:
    """Return the last step with loads, its loads [l, e], and all decisions that changed
    something. Raises ValueError if no loads were recorded."""
    step, tokens_le, decisions = None, None, []
    for record in read_records(path):
        table_le = _table(record.get("tokens_le"))
        if table_le is not None:
            step, tokens_le = record["step"], table_le
        if _is_change(record.get("decision")):
            decisions.append(record["decision"])
    if step is None:
        raise ValueError(
            f"{path} holds no tokens_le: continue the run for at least "
            "Train.log_load_every_steps steps"
        )
    return step, tokens_le, decisions


def _table(table) -> np.ndarray | None:
    """Return a table of loads as an array; None if it is none, as in a damaged line."""
    try:
        load_le = np.asarray(table, np.float64)
    except (ValueError, TypeError, OverflowError):
        return None
    is_table = load_le.ndim == 2 and load_le.size
    is_load = np.isfinite(load_le) & (load_le >= 0)
    return load_le if is_table and is_load.all() else None


def _is_change(decision) -> bool:
    """Return whether a decision changed something and is whole, so that
    `decision_line` can describe it."""
    if not isinstance(decision, dict) or decision.get("kind") == "keep":
        return False
    try:
        decision_line(decision)
    except (LookupError, TypeError, ValueError, AttributeError):
        return False
    return True


def decision_line(record: dict) -> str:
    """Return one line that describes a decision of the balancer."""
    changes = "".join(
        f"  {name} {before}->{after}"
        for name, (before, after) in record["changes"].items()
    )
    ratios = [record[f"device_max_over_mean_{when}"] for when in ("before", "after")]
    return (
        f"step {record['step']}  {record['kind']} {record['digest_before']}->"
        f"{record['digest']}{changes}  device max/mean {ratios[0]:.2f}->"
        f"{ratios[1]:.2f}  moves {record['num_moves']}"
    )


class PlanSource(NamedTuple):
    """Names for a plan and its loads."""

    policy: str
    source: str
    layers: tuple[int, ...]


def compare(
    names: PlanSource,
    plan: ExpertPlan,
    load_lwe: np.ndarray,
    split: Split,
    layer: int | None,
) -> Comparison:
    """Compare a plan with the home plan under the same loads.

    Slots are shown of `layer`, or of the layer that is least even under the home plan.
    """
    layers = names.layers
    if layer is not None and layer not in layers:
        raise ValueError(
            f"--layer {layer} does not exist: use one of {', '.join(map(str, layers))}"
        )
    home = ExpertPlan.home(plan.num_layers, plan.num_experts)
    before_lw = device_rows(home, load_lwe, "even")
    after_lw = device_rows(plan, load_lwe, split)
    before_l, after_l = (over_mean(rows).max(axis=1) for rows in (before_lw, after_lw))
    shown = int(np.argmax(before_l)) if layer is None else layers.index(layer)
    return Comparison(
        title=f"{names.policy} plan {plan.digest}: device max/mean "
        f"{before_l[shown]:.2f} -> {after_l[shown]:.2f} in layer {layers[shown]}",
        source=names.source,
        names=("before (home plan)", "after"),
        layers=layers,
        before_rows_lw=before_lw,
        after_rows_lw=after_lw,
        after=plan,
        shown=shown,
    )


def device_rows(plan: ExpertPlan, load_lwe: np.ndarray, split: Split) -> np.ndarray:
    """Return the rows that each device computes, [l, w]."""
    devices = load_lwe.shape[1]
    pairs = zip(load_lwe, plan.slot_to_expert_lp)
    rows = [traffic.rows_by_slot(we, row_p, devices, split) for we, row_p in pairs]
    return np.stack([traffic.device_rows(rows_wp) for rows_wp in rows])


def say(comparison: Comparison) -> None:
    """Print device max/mean of every layer, then each device of the shown layer with
    its load and the experts in its slots."""
    before_lw, after_lw = (
        over_mean(rows_lw)
        for rows_lw in (comparison.before_rows_lw, comparison.after_rows_lw)
    )
    print(f"{comparison.title}\n{comparison.source}")
    print("layer  device max/mean before  after  replicas  empty slots")
    for index, layer in enumerate(comparison.layers):
        row_p = comparison.after.slot_to_expert_lp[index]
        print(
            f"{layer:5d}{before_lw[index].max():24.2f}{after_lw[index].max():7.2f}"
            f"{np.sum(row_p >= 0) - comparison.after.num_experts:10d}"
            f"{np.sum(row_p < 0):13d}"
        )
    table_ws = comparison.slot_table_ws
    copies_e = np.bincount(table_ws[table_ws >= 0])
    before_w, after_w = before_lw[comparison.shown], after_lw[comparison.shown]
    per_bar = max(before_w.max(), after_w.max()) / BAR_WIDTH
    print(f"\nlayer {comparison.layers[comparison.shown]}: load / mean of each device")
    heads = f"{'before':{BAR_WIDTH + 7}s}{'after':{BAR_WIDTH + 7}s}"
    print(f"device  {heads}experts (* has replicas, - is empty)")
    for device, (before, after) in enumerate(zip(before_w, after_w)):
        bars = "".join(
            f"{ratio:5.2f} {'#' * round(ratio / per_bar):{BAR_WIDTH + 1}s}"
            for ratio in (before, after)
        )
        experts = " ".join(
            "-" if e < 0 else f"{e}{'*' * bool(copies_e[e] > 1)}"
            for e in table_ws[device]
        )
        print(f"{device:6d}  {bars}{experts}")


def make_record(comparison: Comparison, out: pathlib.Path) -> dict:
    before_lw, after_lw = comparison.before_rows_lw, comparison.after_rows_lw
    return {
        "file": str(out),
        "title": comparison.title,
        "source": comparison.source,
        "digest": comparison.after.digest,
        "layers": list(comparison.layers),
        "device_max_over_mean_before": over_mean(before_lw).max(axis=1).tolist(),
        "device_max_over_mean_after": over_mean(after_lw).max(axis=1).tolist(),
        "plan": json.loads(comparison.after.to_json()),
    }


if __name__ == "__main__":
    sys.exit(main())
