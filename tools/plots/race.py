"""Draw a race of balancing policies, and print its tables as they are in docs/race.md.

    python tools/testbed/run.py race --json
    python tools/plots/race.py runs/race/routing_gpt_e32_seed0 [--out DIR] [--json]

<folder>_load.png   device max/mean of the worst layer over steps, a panel for each arm
<folder>_time.png   where the time of a step goes in each arm

The folder has a file for each arm, as tools/testbed/run.py writes them. Exit codes: 0
done, 2 bad input, 3 a picture could not be written.
"""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Mapping

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from tools.launch.arguments import new_parser  # noqa: E402
from tools.testbed import arms  # noqa: E402
from tools.testbed.standings import standings  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402

PARTS = {
    "experts": ("#0072b2", "experts, if even"),
    "wait": ("#d55e00", "waiting for the fullest"),
    "wires": ("#56b4e9", "rows on wires"),
    "copies": ("#e69f00", "weights on wires"),
    "blocks": ("#009e73", "attention"),
    "adoptions": ("#cc79a7", "host at plans"),
    "rest": ("#bbbbbb", "rest"),
}
"""Colors (those of Okabe and Ito) and labels of the parts of a step."""
DOTS = {"dpi": 110, "pil_kwargs": {"optimize": True}}
COLUMNS = 4
"""Number of panels beside one another."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("folder", type=pathlib.Path, help="folder of a race's results")
    add(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("."),
        help="folder for the pictures",
    )
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    results = read_results(args.folder)
    args.out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in (("load", draw_load), ("time", draw_time)):
        path = args.out / f"{args.folder.resolve().name}_{name}.png"
        draw(results).savefig(path, **DOTS)
        print(f"{path}  {path.stat().st_size / 1e3:.0f} kB")
        written.append(str(path))
    for table in (times_table(results), parts_table(results)):
        print("\n" + "\n".join(table))
    emit({"out": written}, args.json)
    return DONE


def read_results(folder: pathlib.Path) -> dict[str, dict]:
    """Return the results of a race's arms by name. Raises ValueError for a folder that
    has none, or one that cannot be read."""
    results = {}
    for name in arms.ARMS:
        path = folder / f"{name}.json"
        try:
            text = path.read_text()
        except FileNotFoundError:
            continue
        try:
            result = json.loads(text)
            result["figures"]["parts_sec"], result["arm"]["max_over_mean"]
        except (ValueError, KeyError, TypeError) as fault:
            raise ValueError(f"{path} is not the result of an arm: {fault}") from fault
        results[name] = result
    if not results:
        raise ValueError(
            f"{folder} has no result of a race: run tools/testbed/run.py race first"
        )
    return results


def draw_load(results: Mapping[str, dict]):
    """Return the figure of device max/mean over steps."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(results) / COLUMNS)
    figure = Figure(figsize=(2.9 * COLUMNS, 1.7 * rows + 0.7), layout="constrained")
    axes = figure.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False)
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, (name, result) in zip(axes.flat, results.items()):
        arm = result["arm"]
        axis.plot(arm["step"], arm["home_max_over_mean"], color="#bbbbbb", lw=1)
        axis.plot(arm["step"], arm["max_over_mean"], color="#0072b2", lw=1.2)
        for step in arm["adopted"]:
            axis.axvline(step, ymax=0.06, color="#d55e00", lw=0.8)
        axis.set_title(name, fontsize=9)
        axis.tick_params(labelsize=8)
    ratios = [x for r in results.values() for x in r["arm"]["home_max_over_mean"]]
    ratios += [x for r in results.values() for x in r["arm"]["max_over_mean"]]
    axes.flat[0].set_ylim(0.9, 1.05 * max(ratios))  # of all panels
    figure.supxlabel("step; orange: a plan or a layout was adopted", fontsize=9)
    figure.supylabel("device max/mean of the worst layer", fontsize=9)
    title = "blue: as it ran   grey: the home placement of the same loads"
    figure.suptitle(title, fontsize=9)
    return figure


def draw_time(results: Mapping[str, dict]):
    """Return the figure of the parts of a step by arm."""
    from matplotlib.figure import Figure

    names = list(results)[::-1]
    figure = Figure(figsize=(9.5, 0.34 * len(names) + 1.6), layout="constrained")
    axis = figure.subplots()
    left = [0.0] * len(names)
    for part, (color, label) in PARTS.items():
        width = [max(0.0, results[n]["figures"]["parts_sec"][part]) for n in names]
        axis.barh(names, width, left=left, color=color, label=label)
        left = [a + b for a, b in zip(left, width)]
    axis.set_xlabel("seconds of a step")
    axis.tick_params(labelsize=9)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure


def times_table(results: Mapping[str, dict]) -> list[str]:
    """Return the lines of the Markdown table of times, the fastest arm first."""
    lines = [
        "| arm | s per step | times as fast as home (blocks) | of forced | "
        "device max/mean | swaps | relayouts | dropped | MiB of slots, buffers |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    made_by = {name: result["figures"] for name, result in results.items()}
    made_by = standings(made_by, arms.CEILING)
    by_time = sorted(results, key=lambda name: -_speedup(results[name]))
    for name in by_time:
        made = made_by[name]
        spread, share = made["speedup_of_blocks"], made["of_forced_balance"]
        blocks = f"{spread['min']:.2f} to {spread['max']:.2f}"
        mib = [made[f"bytes_of_{what}"] / 2**20 for what in ("slots", "buffers")]
        cells = [
            f"`{name}`",
            f"{made['sec_per_step']:.3f}",
            f"{_speedup(results[name]):.2f} ({blocks})",
            "-" if share is None else f"{share:.0%}",
            f"{made['max_over_mean_p50']:.2f}",
            str(made["num_swaps"]),
            str(made["num_relayouts"]),
            f"{made['dropped_share']:.1%}",
            f"{mib[0]:.1f}, {mib[1]:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def parts_table(results: Mapping[str, dict]) -> list[str]:
    """Return the lines of the Markdown table of the parts of a step in milliseconds,
    and of the cost model's predictions."""
    heads = [label for _, label in PARTS.values()]
    lines = [
        f"| arm | {' | '.join(heads)} | modelled, of measured | correlation |",
        "|---|" + "--:|" * (len(PARTS) + 2),
    ]
    for name, result in results.items():
        made, predicted = result["figures"], result["figures"]["prediction"]
        cells = [f"{1e3 * made['parts_sec'][part]:.0f}" for part in PARTS]
        related = predicted["correlation"]
        cells += [
            f"{predicted['modelled_step_msec']:.0f} of {predicted['step_msec']:.0f} ms",
            "-" if related is None else f"{related:.2f}",
        ]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def _speedup(result: Mapping) -> float:
    """Return the speedup of an arm over home beside it; where no quota was possible, it
    is that of the times, which mean little then."""
    made = result["figures"]
    return made["speedup"] or made["home_sec_per_step"] / made["sec_per_step"]


if __name__ == "__main__":
    sys.exit(main())
