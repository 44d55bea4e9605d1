"""Draw pictures and print tables of a testbed's measurements of domains and schedules.

    python tools/testbed/run.py headline --only domains,schedules,selector --json \\
        > h.json
    python tools/plots/testbed.py h.json [--out DIR] [--json]

testbed_domains.png    measured and predicted step time of every domain over D, by P_E
                       (in the style of HybridEP, arXiv 2510.19470, Fig. 13)
testbed_schedules.png  measured and predicted step time of each schedule, by layer
testbed_selector.png   predicted against measured time of each layer and schedule

The record is the last line of the file. Only parts that it has are drawn. Exit codes: 0
done, 2 bad input, 3 a picture could not be written.
"""

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402

STYLES = {
    "1x1": ("#d55e00", "plain"),
    "2x1": ("#0072b2", "dc 2 x expert 1"),
    "1x2": ("#e69f00", "dc 1 x expert 2"),
    "2x2": ("#009e73", "dc 2 x expert 2: all experts"),
    "base": ("#d55e00", "base"),
    "s1": ("#56b4e9", "s1"),
    "s2": ("#cc79a7", "s2"),
    "s1h": ("#0072b2", "s1h"),
    "local": ("#009e73", "local"),
}
"""Colors (those of Okabe and Ito) and labels of the variants."""
CELL = re.compile(r"D=([\d.]+) P_E=([\d.]+)")
DOTS = {"dpi": 110, "pil_kwargs": {"optimize": True}}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add(
        "record",
        type=pathlib.Path,
        help="file with the output of tools/testbed/run.py headline --json",
    )
    add(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("."),
        help="folder for the pictures",
    )
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    parts = read_parts(args.record)
    args.out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, part in parts.items():
        print(f"\n{name}\n" + "\n".join(table(part)))
        path = args.out / f"testbed_{name}.png"
        PICTURES[name](part).savefig(path, **DOTS)
        print(f"{path}  {path.stat().st_size / 1e3:.0f} kB")
        written.append(str(path))
    emit({"out": written}, args.json)
    return DONE


def read_parts(path: pathlib.Path) -> dict[str, dict]:
    """Return the record of each part in a file. Raises ValueError, with one line, if it
    has none."""
    try:
        lines = path.read_text(encoding="utf-8").strip().splitlines()
        record = json.loads(lines[-1]) if lines else {}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"cannot read {path}: {error}: give the output of "
            "tools/testbed/run.py headline --json"
        ) from error
    if not isinstance(record, dict):
        record = {}
    parts = {name: record[name] for name in PICTURES if name in record}
    if not parts:
        raise ValueError(
            f"{path} has none of {', '.join(PICTURES)}: measure them with "
            "tools/testbed/run.py headline --only domains,schedules,selector --json"
        )
    return parts


def table(part: dict) -> list[str]:
    """Return the lines of a table: milliseconds of each variant, with predictions in
    brackets, and the MB that left the first DC, with those expected from the program's
    collectives in brackets."""
    variants = list(
        dict.fromkeys(variant for c in part["cases"] for variant in c["predicted_sec"])
    )
    rows = [
        "| case | " + " | ".join(variants) + " | chosen | again | MB of chosen |",
        "|---|" + "--:|" * len(variants) + "---|--:|--:|",
    ]
    for case in part["cases"]:
        cells = [_cell(case, variant) for variant in variants]
        sent, expected = (
            1e-6 * case[name]["auto"] for name in ("sent_bytes", "expected_bytes")
        )
        cells += [case["chosen"], f"{1e3 * case['step_sec']['auto']:.0f}"]
        rows.append(f"| {case['name']} | " + " | ".join(cells) + " | "
                    f"{sent:.2f} [{expected:.2f}] |")  # fmt: skip
    return rows


def _cell(case: dict, variant: str) -> str:
    if variant not in case["step_sec"]:
        return ""
    sec, predicted_sec = case["step_sec"][variant], case["predicted_sec"][variant]
    mark = "**" if variant == case["chosen"] else ""
    return f"{mark}{1e3 * sec:.0f}{mark} [{1e3 * predicted_sec:.0f}]"


def draw_domains(part: dict):
    """Return the figure of the part `domains`: step time over D, by P_E."""
    cells = {}
    for case in part["cases"]:
        rows, experts = map(float, CELL.fullmatch(case["name"]).groups())
        cells.setdefault(experts, []).append((rows, case))
    figure, axs = _panels(len(cells))
    for ax, (experts, column) in zip(axs, sorted(cells.items())):
        sizes = [rows for rows, _ in column]
        for variant in column[0][1]["predicted_sec"]:
            color, label = STYLES[variant]
            for key, line, width in (
                ("step_sec", "o-", 1.6),
                ("predicted_sec", ":", 1),
            ):
                times = [1e3 * case[key][variant] for _, case in column]
                shown = label if key == "step_sec" else None
                ax.plot(sizes, times, line, color=color, lw=width, ms=4, label=shown)
        chosen = [1e3 * case["step_sec"]["auto"] for _, case in column]
        ax.plot(sizes, chosen, "o", mfc="none", mec="0.2", ms=11, label="auto")
        ax.set(xscale="log", yscale="log", xticks=sizes, xlabel="D, MiB")
        ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
        ax.minorticks_off()
        ax.set_title(f"$P_E$ = {experts:g} MiB", fontsize=10)
    axs[0].set_ylabel("step, ms (dotted: predicted)")
    axs[-1].legend(frameon=False, fontsize=8)
    return figure


def draw_schedules(part: dict):
    """Return the figure of the part `schedules`: step time of each, by case."""
    figure, (ax,) = _panels(1)
    variants = list(part["cases"][0]["predicted_sec"])
    for index, variant in enumerate(variants):
        xs = [n + (index - (len(variants) - 1) / 2) * 0.2 for n in _numbers(part)]
        times = [1e3 * case["step_sec"][variant] for case in part["cases"]]
        predicted = [1e3 * case["predicted_sec"][variant] for case in part["cases"]]
        color, label = STYLES[variant]
        ax.bar(xs, times, 0.18, color=color, label=label)
        shown = "predicted" if variant == variants[-1] else None
        ax.plot(xs, predicted, "_", color="0.1", ms=12, mew=2, label=shown)
        for x, time, mark in zip(xs, times, predicted):
            above = {"ha": "center", "va": "bottom", "fontsize": 7}
            ax.text(x, max(time, mark) * 1.01, f"{time:.0f}", **above)
    names = [case["name"] for case in part["cases"]]
    ax.set_xticks(list(_numbers(part)), names)
    ax.set_ylabel("step, ms")
    ax.legend(frameon=False)
    return figure


def draw_selector(part: dict):
    """Return the figure of the part `selector`: predicted against measured times."""
    figure, (ax,) = _panels(1)
    points = [
        (
            variant,
            1e3 * predicted_sec,
            1e3 * case["step_sec"][variant],
            variant == case["chosen"],
        )
        for case in part["cases"]
        for variant, predicted_sec in case["predicted_sec"].items()
    ]
    for variant in dict.fromkeys(point[0] for point in points):
        predicted, times = zip(*[p[1:3] for p in points if p[0] == variant])
        color, label = STYLES[variant]
        ax.plot(predicted, times, "o", color=color, ms=4, label=label)
    predicted, times = zip(*[point[1:3] for point in points if point[3]])
    ax.plot(predicted, times, "o", mfc="none", mec="0.2", ms=9, label="chosen")
    ends = [min(min(p[1:3]) for p in points), max(max(p[1:3]) for p in points)]
    ax.plot(ends, ends, "-", color="0.7", lw=1, zorder=0)
    ax.set(xscale="log", yscale="log", xlabel="predicted, ms", ylabel="measured, ms")
    ax.legend(frameon=False)
    return figure


def _panels(count: int):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6 if count == 1 else 9.6, 4.2), layout="constrained")
    axs = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for ax in axs:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axs


def _numbers(part: dict) -> range:
    return range(len(part["cases"]))


PICTURES: dict[str, Callable] = {
    "domains": draw_domains,
    "schedules": draw_schedules,
    "selector": draw_selector,
}


if __name__ == "__main__":
    sys.exit(main())
