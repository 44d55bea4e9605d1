"""Recorded loads against any policy, offline: plan from one sample, score on the next.

    python tools/replay.py --trace routing.npz --devices 16 --slots 3 --policies all
    python tools/replay.py --synthetic zipf:1.2 --policies home,flexmoe,eplb --by_layer

Each layer is planned and scored by itself. A policy without replicas has a slot for
each own expert; one whose copies travel in each step (fastermoe, prophet) has --shadows
more; the others have --slots. The layout's budgets are those that a plan takes.
Rows are split over replicas as the policy says, or as --split does; 'dynamic' makes the
replicas itself, in every sample, and is for policies that make none.
Without --calibration the cost model is the preset of 12.5 GB/s, 50 TFLOP/s, d=1536,
f=3072, fp16.

docs/balance_tools.md lists the fields of --json. Exit codes: 0 done, 2 bad input.
"""

import argparse
import dataclasses
import pathlib
import sys
import time
from typing import get_args

import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from moejax.balance.policies import POLICIES, Policy, check_policy  # noqa: E402
from moejax.perf import cost_model as cost_models  # noqa: E402
from moejax.perf import traffic  # noqa: E402
from moejax.perf.cost_model import CostModel  # noqa: E402
from moejax.plan.expert_plan import ExpertPlan  # noqa: E402
from moejax.plan.layout import Layout, Split  # noqa: E402
from tools.bench import expert_loads  # noqa: E402
from tools.bench.expert_loads import Loads  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402

HEADS = ("p50", "p90", "max", "msec", "speedup", "moves", "changes", "plan ms")
FIELDS = (
    "max_over_mean_p50", "max_over_mean_p90", "max_over_mean_max", "layer_msec",
    "speedup", "moves", "changes", "plan_msec",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Times:
    """Sample that each plan is made from, and the one that it is scored on."""

    planned: range
    scored: range

    @classmethod
    def of(cls, num_samples: int, stride: int, *, same: bool) -> "Times":
        if same:
            return cls(range(0, num_samples, stride), range(0, num_samples, stride))
        return cls(range(0, num_samples - 1, stride), range(1, num_samples, stride))


@dataclasses.dataclass(frozen=True)
class Replayed:
    """One policy on all layers; n scored samples of l layers."""

    ratio_nl: np.ndarray
    """Device load, max over mean."""
    layer_sec_nl: np.ndarray
    plan_sec_nl: np.ndarray
    moves_nl: np.ndarray
    """Slots that a plan fills differently from the one before."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    expert_loads.add_options(parser)
    add_layout_options(parser)
    add = parser.add_argument
    add("--policies", default="all", help="names with commas between, or all")
    add("--split", choices=get_args(Split), help="of rows over replicas: the policy's")
    add("--same", action="store_true", help="score on the sample planned from")
    add("--stride", type=int, default=1, help="plan from every so many-th sample: 1")
    add("--by_layer", action="store_true", help="print each layer too")
    return parser.parse_args(argv)


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--slots", type=int, default=3, help="per device, of policies with replicas: 3")
    add("--shadows", type=int, default=8, help="slots for copies of each step: 8")
    add("--calibration", type=pathlib.Path, help="file of tools/calibrate.py")
    add("--d_model", type=int, default=1536, help="with --calibration: 1536")
    add("--d_expert", type=int, default=3072, help="with --calibration: 3072")
    add("--micro_batches", type=int, default=1, help="with --calibration: 1")


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

    def replayed(name: str, split: Split | None) -> Replayed:
        layout = layout_for(POLICIES[name], loads.load_tlwe.shape[3], args, split)
        return replay(name, loads.load_tlwe, times, layout, cost)

    home = replayed("home", None)  # what speedup is over
    policies = {
        name: figures(replayed(name, args.split), home, loads.layers) for name in names
    }
    show(policies, loads, args)
    emit(make_record(policies, loads, len(times.planned), args), args.json)
    return DONE


def policy_names(text: str) -> list[str]:
    if text == "all":
        return list(POLICIES)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        check_policy(name)
    return names


def check_split(split: Split | None, names: list[str]) -> None:
    others = [name for name in names if name != "home"]
    if split == "dynamic" and others:
        raise ValueError(
            "--split dynamic makes the replicas itself, of experts at home, and "
            f"{', '.join(others)} would plan too: give --policies home"
        )


def cost_model(args: argparse.Namespace) -> CostModel:
    if args.calibration is None:
        return cost_models.NOTES
    from moejax.perf import calibration

    found = calibration.read_calibration(args.calibration)
    mesh = found.mesh | {"expert": args.devices}
    calibration.check(found, mesh, found.device_kind, found.compute_dtype)
    return calibration.cost_model(
        found,
        d_model=args.d_model,
        d_expert=args.d_expert,
        itemsize=4 if found.compute_dtype == "float32" else 2,
        micro_batches=args.micro_batches,
        other_flops_per_device=0.0,
    )


def layout_for(
    policy: Policy,
    num_experts: int,
    args: argparse.Namespace,
    split: Split | None = None,
) -> Layout:
    """With room for whatever is planned. Rows travel ragged: as many as there are."""
    store, own = policy.stores[0], num_experts // args.devices
    slots, budgets = args.slots, {}
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
        rows_per_peer=max(slots, 8),
        transport="ragged" if args.devices > 1 else "local",
        store=store,
        split=split or policy.split,
        prefetch=policy.prefetch,
        **budgets,
    )


def replay(
    name: str, load_tlwe: np.ndarray, times: Times, layout: Layout, cost: CostModel
) -> Replayed:
    num_layers = load_tlwe.shape[1]
    arrays = [np.zeros((len(times.planned), num_layers)) for _ in range(4)]
    ratio_nl, layer_sec_nl, plan_sec_nl, moves_nl = arrays
    plan = POLICIES[name].plan
    for layer in range(num_layers):
        current = ExpertPlan.home_in(layout, 1)
        for n, (planned, scored) in enumerate(zip(times.planned, times.scored)):
            begin = time.perf_counter()
            new = plan(load_tlwe[planned, layer][None], layout, cost, current)
            if layout.split == "dynamic":
                new = new.resized(layout)
            plan_sec_nl[n, layer] = time.perf_counter() - begin
            new.validate(layout)
            moves_nl[n, layer] = len(current.moves(new))
            ratio_nl[n, layer], layer_sec_nl[n, layer] = score(
                load_tlwe[scored, layer], new, layout, cost
            )
            current = new
    return Replayed(*arrays)


def score(
    load_we: np.ndarray, plan: ExpertPlan, layout: Layout, cost: CostModel
) -> tuple[float, float]:
    """Device max over mean, and modelled seconds, of the one layer of `plan`."""
    row_p = plan.slot_to_expert_lp[0]
    layout = cost_models.tight(layout, plan)  # as a relayout would set them
    rows_wp = traffic.rows_by_slot(load_we, row_p, layout.num_devices, layout.split)
    ratio = traffic.max_over_mean(traffic.device_rows(rows_wp))
    return ratio, cost.layer_sec(load_we, row_p, layout)


def figures(replayed: Replayed, home: Replayed, layers: tuple[int, ...]) -> dict:
    """{layer: figures, 'all': figures}. `all` pools samples and layers; its layer_msec
    is the median over samples of the mean layer."""
    index = np.arange(len(layers))
    parts = {str(name): index[i : i + 1] for i, name in enumerate(layers)}
    return {
        name: _figures(replayed, home, part)
        for name, part in (parts | {"all": index}).items()
    }


def _figures(replayed: Replayed, home: Replayed, part: np.ndarray) -> dict:
    ratio_nl = replayed.ratio_nl[:, part]
    # The first plan replaces home's, and is no change of a policy's mind.
    moves_nl = replayed.moves_nl[1:, part]
    num_changes = np.count_nonzero(moves_nl)
    sec, home_sec = (
        float(np.median(r.layer_sec_nl[:, part].mean(axis=1))) for r in (replayed, home)
    )
    return {
        "max_over_mean_p50": float(np.median(ratio_nl)),
        "max_over_mean_p90": float(np.percentile(ratio_nl, 90)),
        "max_over_mean_max": float(ratio_nl.max()),
        "layer_msec": 1e3 * sec,
        "speedup": home_sec / sec,
        "moves": float(moves_nl.sum() / max(num_changes, 1)),
        "changes": float(num_changes / max(moves_nl.size, 1)),
        "plan_msec": 1e3 * float(np.median(replayed.plan_sec_nl[:, part])),
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
        "slots": args.slots,
        "shadows": args.shadows,
        "cost_model": str(args.calibration) if args.calibration else "notes",
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
    print("p50, p90, max: device load, max over mean. msec: modelled, of one layer")


if __name__ == "__main__":
    sys.exit(main())
