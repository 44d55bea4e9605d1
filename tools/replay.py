"""Replay recorded expert loads under balancing policies, without training.

    python tools/replay.py --trace routing.npz --devices 16 --slots 3 --policies all
    python tools/replay.py --synthetic zipf:1.2 --policies home,flexmoe,eplb --by_layer
    python tools/replay.py --run runs/mine --policies all

Each policy makes a plan from one sample, which is scored on the next sample. Each layer
is planned and scored by itself. Slots per device: a policy without replicas has one for
each of the device's own experts; a policy whose copies travel in each step (fastermoe,
prophet) has --shadows more; the others have --slots. The layout's budgets are those
that a plan uses. Rows are split over replicas by the policy's own split, or by --split.
The split 'dynamic' makes the replicas itself in every sample, so it is for policies
that make none. With --run, the cost model has the run's sizes and speeds. Otherwise,
without --calibration, it is a preset: 12.5 GB/s, 50 TFLOP/s, d=1536, f=3072, fp16.

docs/balance_tools.md lists the fields of --json. Exit codes: 0 done, 2 bad input.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from typing import get_args

import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from moejax.balance.policies import (  # noqa: E402
    POLICIES,
    Policy,
    check_plan,
    check_policy,
)
from moejax.perf import cost_model as cost_models  # noqa: E402
from moejax.perf import traffic  # noqa: E402
from moejax.perf.cost_model import CostModel  # noqa: E402
from moejax.plan.expert_plan import ExpertPlan  # noqa: E402
from moejax.plan.layout import Layout, Split  # noqa: E402
from tools.bench import expert_loads  # noqa: E402
from tools.bench.expert_loads import Loads  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402
from train.logs.counter import counted  # noqa: E402
from train.logs.record_lines import read_records  # noqa: E402

MANY_ROWS = 2**24
"""Rows per peer that no load exceeds, so that every exchange has one round."""
HEADS = ("p50", "p90", "max", "model ms", "speedup", "moves", "changes", "plan ms")
FIELDS = (
    "device_max_over_mean_p50", "device_max_over_mean_p90",
    "device_max_over_mean_max", "modelled_layer_msec", "speedup", "moves", "changes",
    "plan_msec",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Times:
    """Numbers of the samples that plans are made from, and of those on which each plan
    is scored."""

    planned: range
    scored: range

    @classmethod
    def of(cls, num_samples: int, stride: int, *, same: bool) -> "Times":
        """Return every `stride`-th sample, scored on the next one or on the same."""
        if same:
            return cls(range(0, num_samples, stride), range(0, num_samples, stride))
        return cls(range(0, num_samples - 1, stride), range(1, num_samples, stride))


@dataclasses.dataclass(frozen=True)
class ReplayResult:
    """Results of one policy: n scored samples of l layers."""

    ratio_nl: np.ndarray
    """Load of the fullest device over the mean."""
    layer_sec_nl: np.ndarray
    plan_sec_nl: np.ndarray
    moves_nl: np.ndarray
    """Number of slots that a plan fills differently from the plan before."""


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
        help="directory of a run with Train.log_sources = True and a checkpoint",
    )
    add_layout_options(parser)
    add = parser.add_argument
    add("--policies", default="all", help="policies with commas between, or all")
    add(
        "--split",
        choices=[s for s in get_args(Split) if s not in ("shadow", "top_up")],
        help="how rows are split over replicas (default: each policy's own split)",
    )
    add(
        "--same",
        action="store_true",
        help="score each plan on the sample that it was made from, not the next one",
    )
    add(
        "--stride",
        type=int,
        default=1,
        help="plan from every N-th sample",
        metavar="N",
    )
    add(
        "--by_layer",
        action="store_true",
        help="print the figures of each layer too",
    )
    return parser.parse_args(argv)


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of layouts and of the cost model."""
    add = parser.add_argument
    add(
        "--slots",
        type=int,
        help="slots per device, for policies with replicas (default: one more than the "
        "own experts)",
    )
    add(
        "--shadows",
        type=int,
        default=8,
        help="slots per device for copies that travel in each step, beside those of"
        " its own experts",
    )
    add(
        "--calibration",
        type=pathlib.Path,
        help="speeds of this machine, from tools/calibrate.py (default: a preset)",
    )
    add(
        "--d_model",
        type=int,
        default=1536,
        help="width of the model, used with --calibration",
    )
    add(
        "--d_expert",
        type=int,
        default=3072,
        help="hidden width of an expert, used with --calibration",
    )
    add(
        "--micro_batches",
        type=int,
        default=1,
        help="micro-batches per step, used with --calibration",
    )
    add(
        "--num_nodes",
        type=int,
        default=1,
        help="nodes, equal runs of consecutive devices, for eplb and laer",
    )
    add(
        "--num_expert_groups",
        type=int,
        default=1,
        help="groups of consecutive experts, each of which eplb keeps on one node",
    )


def work(args: argparse.Namespace) -> int:
    names = policy_names(args.policies)
    check_split(args.split, names)
    if args.stride < 1:
        raise ValueError(f"--stride {args.stride} must be at least 1")
    loads = expert_loads.from_options(args)
    if len(loads.load_tlwe) < 2 - args.same:
        raise ValueError(
            f"{loads.name} has one sample, too few to plan from one and score on the "
            "next: give --same"
        )
    times = Times.of(len(loads.load_tlwe), args.stride, same=args.same)
    cost = cost_model(args)

    def run_policy(name: str, split: Split | None) -> ReplayResult:
        layout = layout_for(POLICIES[name], loads.load_tlwe.shape[3], args, split)
        policy = find_policy(name, loads, args)
        counter.set(text=name)
        return replay(name, policy, loads, times, layout, cost, counter.advance)

    total = (1 + len(names)) * len(times.planned)
    with counted("replay", "samples", total) as counter:
        home = run_policy("home", None)  # every speedup is over this one
        policies = {
            name: figures(run_policy(name, args.split), home, loads.layers)
            for name in names
        }
    show(policies, loads, args)
    emit(make_record(policies, loads, len(times.planned), args), args.json)
    return DONE


def policy_names(text: str) -> list[str]:
    """Return the policies that `text` names, with commas between, or 'all'."""
    if text == "all":
        return list(POLICIES)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        check_policy(name)
    return names


def check_split(split: Split | None, names: list[str]) -> None:
    """Raise ValueError if the split is 'dynamic' and a policy makes replicas too."""
    others = [name for name in names if name != "home"]
    if split == "dynamic" and others:
        raise ValueError(
            "--split dynamic makes the replicas itself, from the home plan, and "
            f"{', '.join(others)} would plan them too: give --policies home"
        )


def cost_model(args: argparse.Namespace) -> CostModel:
    """Return the cost model of --run or --calibration, or the preset. Raises ValueError
    if the file's expert axis does not have --devices devices."""
    if args.run is not None:
        return run_cost_model(args.run)
    if args.calibration is None:
        return cost_models.NOTES
    from moejax.perf import calibration

    measured = calibration.read_calibration(args.calibration)
    mesh = measured.mesh | {"expert": args.devices}
    calibration.check(measured, mesh, measured.device_kind, measured.compute_dtype)
    cost = cost_models.cost_model(
        measured,
        d_model=args.d_model,
        d_expert=args.d_expert,
        itemsize=4 if measured.compute_dtype == "float32" else 2,
        micro_batches=args.micro_batches,
        other_flops_per_device=0.0,
    )
    return dataclasses.replace(cost, calibration=None)  # --devices have its speeds


def run_cost_model(folder: pathlib.Path) -> CostModel:
    """Return the cost model that a run had: its model's sizes at the speeds of its
    calibration, else those stated for its devices, else presumed ones. Raises
    ValueError where the run has no checkpoint."""
    from moejax.perf import cluster
    from moejax.resolve.speeds import load_calibration, make_cost_model
    from train.checkpoint.record import newest_meta
    from train.config.names import config_from_record

    meta = newest_meta(folder / "checkpoints")
    if meta is None:
        raise ValueError(f"{folder} has no complete checkpoint, which holds its sizes")
    cfg = config_from_record(meta["config"])
    attempts = list(read_records(folder / "attempts.jsonl"))
    kind = attempts[-1].get("device_kind") if attempts else None
    num_devices = cfg.mesh.num_devices
    gpus = None if kind is None else cluster.of_device(kind, num_devices)
    cost = make_cost_model(cfg, load_calibration(cfg, kind, gpus))
    return dataclasses.replace(cost, calibration=None)  # of --devices, at its speeds


def layout_for(
    policy: Policy,
    num_experts: int,
    args: argparse.Namespace,
    split: Split | None = None,
) -> Layout:
    """Return the layout in which a policy plans, with budgets for whatever it plans.

    The transport is ragged, so that only existing rows travel and no buffer is full.
    """
    store, own = policy.stores[0], num_experts // args.devices
    slots, budgets = num_slots(args, num_experts), {}
    if split == "dynamic":
        store, copies = "transient", min(own, num_experts - own)
        slots = own + copies
        budgets = {"offers_per_device": own, "copies_per_device": copies}
    elif store == "owned":
        slots = own
    elif store == "transient":
        slots = own + args.shadows
        budgets = {"offers_per_device": own, "copies_per_device": args.shadows}
    elif store == "resident":
        budgets = {"offers_per_device": own, "copies_per_device": slots}
    return Layout(
        num_experts=num_experts,
        num_devices=args.devices,
        slots_per_device=slots,
        rows_per_peer=MANY_ROWS,
        transport="ragged" if args.devices > 1 else "local",
        store=store,
        split=split or policy.split,
        prefetch=policy.prefetch,
        **budgets,
    )


def num_slots(args: argparse.Namespace, num_experts: int) -> int:
    """Return the slots per device of policies with replicas."""
    if args.slots is not None:
        return args.slots
    return num_experts // args.devices + 1


def find_policy(name: str, loads: Loads, args: argparse.Namespace) -> Policy:
    """Return the policy with the options that were given; raise ValueError for those
    that do not fit the loads."""
    num_experts = loads.load_tlwe.shape[3]
    for option, total, what in (
        ("num_nodes", args.devices, "devices"),
        ("num_expert_groups", num_experts, "experts"),
    ):
        number = getattr(args, option)
        if number < 1 or total % number:
            raise ValueError(f"--{option} {number} must divide the {total} {what}")
    return check_policy(name).with_options(args)


def replay(
    name: str,
    policy: Policy,
    loads: Loads,
    times: Times,
    layout: Layout,
    cost: CostModel,
    advance: Callable[[float], None] = lambda _: None,
) -> ReplayResult:
    """Plan each sample with a policy and score the plan, layer by layer; call `advance`
    with the part of a sample that is done. Raises ValueError where a plan is
    invalid."""
    load_tlwe, layers = loads.load_tlwe, loads.layers
    num_layers = load_tlwe.shape[1]
    arrays = [np.zeros((len(times.planned), num_layers)) for _ in range(4)]
    ratio_nl, layer_sec_nl, plan_sec_nl, moves_nl = arrays
    for layer in range(num_layers):
        current = ExpertPlan.home_in(layout, 1)
        for n, (planned, scored) in enumerate(zip(times.planned, times.scored)):
            begin = time.perf_counter()
            load_1we = load_tlwe[planned, layer][None]
            new = policy.plan(load_1we, layout, cost, current)
            if layout.split == "dynamic":
                new = new.resized(layout)
            plan_sec_nl[n, layer] = time.perf_counter() - begin
            check_plan(name, new, layout, [layers[layer]])
            moves_nl[n, layer] = len(current.moves(new))
            ratio_nl[n, layer], layer_sec_nl[n, layer] = score(
                load_tlwe[scored, layer], new, layout, cost
            )
            current = new
            advance(1 / num_layers)
    return ReplayResult(*arrays)


def score(
    load_we: np.ndarray, plan: ExpertPlan, layout: Layout, cost: CostModel
) -> tuple[float, float]:
    """Return the device max/mean and modelled seconds of the one layer of `plan`."""
    row_p = plan.slot_to_expert_lp[0]
    layout = cost_models.tight(layout, plan)  # budgets as a relayout would set them
    rows_wp = traffic.rows_by_slot(load_we, row_p, layout.num_devices, layout.split)
    ratio = traffic.max_over_mean(traffic.device_rows(rows_wp))
    return ratio, cost.layer_sec(load_we, row_p, layout)


def figures(result: ReplayResult, home: ReplayResult, layers: tuple[int, ...]) -> dict:
    """Summarize a replay: the figures of each layer, by its name, and of 'all' layers.

    `all` pools samples and layers. Its modelled_layer_msec is the median over samples
    of the mean over layers.
    """
    index = np.arange(len(layers))
    parts = {str(name): index[i : i + 1] for i, name in enumerate(layers)}
    return {
        name: _figures(result, home, part)
        for name, part in (parts | {"all": index}).items()
    }


def _figures(result: ReplayResult, home: ReplayResult, part: np.ndarray) -> dict:
    ratio_nl = result.ratio_nl[:, part]
    # The first plan replaces the home plan, which does not count as a change.
    moves_nl = result.moves_nl[1:, part]
    num_changes = np.count_nonzero(moves_nl)
    sec, home_sec = (
        float(np.median(r.layer_sec_nl[:, part].mean(axis=1))) for r in (result, home)
    )
    return {
        "device_max_over_mean_p50": float(np.median(ratio_nl)),
        "device_max_over_mean_p90": float(np.percentile(ratio_nl, 90)),
        "device_max_over_mean_max": float(ratio_nl.max()),
        "modelled_layer_msec": 1e3 * sec,
        "speedup": home_sec / sec,
        "moves": float(moves_nl.sum() / max(num_changes, 1)),
        "changes": float(num_changes / max(moves_nl.size, 1)),
        "plan_msec": 1e3 * float(np.median(result.plan_sec_nl[:, part])),
    }


def make_record(
    policies: dict, loads: Loads, num_samples: int, args: argparse.Namespace
) -> dict:
    return {
        "trace": loads.name,
        "num_samples": num_samples,
        "scored_on": "same" if args.same else "next",
        "layers": list(loads.layers),
        "num_experts": loads.load_tlwe.shape[3],
        "devices": args.devices,
        "split": args.split or "policy",
        "slots": num_slots(args, loads.load_tlwe.shape[3]),
        "shadows": args.shadows,
        "cost_model": str(args.run or args.calibration or "notes"),
        "policies": policies,
    }


def show(policies: dict, loads: Loads, args: argparse.Namespace) -> None:
    layers = ", ".join(map(str, loads.layers))
    on = "the same" if args.same else "the next"
    print(
        f"{loads.name}: {loads.load_tlwe.shape[3]} experts on {args.devices} devices, "
        f"layers {layers}, split {args.split or 'policy'}; "
        f"planned from one sample, scored on {on}"
    )
    for part in [*map(str, loads.layers)] * args.by_layer + ["all"]:
        title = "all layers" if part == "all" else f"layer {part}"
        print(f"{title:12s}" + "".join(f"{head:>9s}" for head in HEADS))
        for name, parts in policies.items():
            row = "".join(f"{parts[part][field]:9.2f}" for field in FIELDS)
            print(f"{name:12s}{row}")
    if args.run is not None:
        source = f"the sizes and speeds of {args.run}"
    elif args.calibration is not None:
        sizes = f"d_model {args.d_model}, d_expert {args.d_expert}"
        source = f"the speeds of {args.calibration}, {sizes}"
    else:
        source = "presumed speeds, d_model 1536, d_expert 3072"
    print(
        "p50, p90, max: device max/mean. model ms: modelled time of one layer in a "
        f"step ({source}). plan ms: measured time to plan one layer"
    )


if __name__ == "__main__":
    sys.exit(main())
