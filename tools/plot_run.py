"""Draw pictures of one run, or of several to compare: loss, throughput and load over
time.

    python tools/plot_run.py runs/tiny_cpu [runs/other] [--out DIR] [--json]

loss.png        training loss, smoothed, and held-out loss
throughput.png  tokens per second and milliseconds per step
load.png        fullest device and fullest expert over the mean, layer by step
devices.png     rows of each device over the mean, by layer, where they were recorded
experts.png     load of each expert over the mean, by layer, where it was recorded

The last three show the first run. Lines in them mark the steps at which the balancer's
swaps and relayouts were adopted. Exit codes: 0 done, 2 bad input.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.launch.arguments import new_parser  # noqa: E402
from tools.plots.load_pictures import draw_devices, draw_experts, draw_load, new_figure  # noqa: E402
from tools.plots.run_arrays import RunArrays, read_run  # noqa: E402
from train.launch.program import BAD_INPUT, refuse  # noqa: E402

RUN_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Colors of the runs: those of Okabe and Ito, which differ for every kind of color
vision."""
SMOOTH_SHARE = 50
"""Length of the run over the length of the window that smooths its curves."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        runs = distinguish([read_run(folder) for folder in args.run_dir], args.run_dir)
        out = args.out or args.run_dir[0]
        out.mkdir(parents=True, exist_ok=True)
        files = draw(runs, out)
    except (ValueError, OSError) as error:
        return refuse(error, BAD_INPUT, args.json)
    for run in runs:
        print(f"{run.name}: {len(run.step_n)} steps, up to {run.step_n[-1]}")
        if run.num_bad_lines:
            print(f"{run.name}: {run.num_bad_lines} damaged lines were left out")
    for path in files:
        print(f"{path}  {path.stat().st_size / 1e3:.0f} kB")
    if args.json:
        record = {
            "files": [str(path) for path in files],
            "num_steps": [len(run.step_n) for run in runs],
            "num_bad_lines": [run.num_bad_lines for run in runs],
        }
        print(json.dumps(record))
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument(
        "run_dir", nargs="+", type=pathlib.Path, help="run directory of train/main.py"
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="folder for the pictures (default: the first run_dir)",
    )
    return parser.parse_args(argv)


def distinguish(runs: list[RunArrays], folders: list[pathlib.Path]) -> list[RunArrays]:
    """Return the runs, named by their paths if two of them have the same name."""
    if len({run.name for run in runs}) == len(runs):
        return runs
    return [dataclasses.replace(run, name=str(f)) for run, f in zip(runs, folders)]


def draw(runs: list[RunArrays], out: pathlib.Path) -> list[pathlib.Path]:
    """Draw the pictures that the runs have data for, and return the files in `out`."""
    pictures = {"loss": draw_loss(runs), "throughput": draw_throughput(runs)}
    if np.isfinite(runs[0].ratio_nl).any():
        pictures["load"] = draw_load(runs[0])
    if runs[0].rows_qlw.size:
        pictures["devices"] = draw_devices(runs[0])
    if runs[0].load_qle.size:
        pictures["experts"] = draw_experts(runs[0])
    files = []
    for name, figure in pictures.items():
        files.append(out / f"{name}.png")
        figure.savefig(files[-1], dpi=110, pil_kwargs={"optimize": True})
    return files


def draw_loss(runs: list[RunArrays]):
    """Return a figure with the training and held-out loss of each run."""
    figure, (ax,) = new_figure(1, "step", ["loss (nats per token)"])
    for color, run in zip(RUN_COLORS * len(runs), runs):
        label = f"{run.name} " if len(runs) > 1 else ""
        ax.plot(run.step_n, run.loss_n, color=color, alpha=0.25, lw=0.8)
        ax.plot(run.step_n, smooth(run.loss_n), color=color, label=f"{label}training")
        ax.plot(
            run.eval_step_m, run.eval_loss_m, "o", ms=4, mfc="white", mec=color,
            label=f"{label}held-out",
        )  # fmt: skip
    ax.set_title("loss: training (smoothed over a fiftieth of the run) and held-out")
    ax.legend()
    return figure


def draw_throughput(runs: list[RunArrays]):
    """Return a figure with the throughput and step time of each run. Evaluations and
    saves of the first run are marked."""
    figure, axs = new_figure(2, "step", ["thousand tok/s", "ms per step"])
    for color, run in zip(RUN_COLORS * len(runs), runs):
        for ax, y_n in zip(axs, (run.tok_per_sec_n / 1e3, run.step_msec_n)):
            ax.plot(run.step_n, y_n, color=color, alpha=0.25, lw=0.8)
            ax.plot(run.step_n, smooth(y_n), color=color, label=run.name)
            _fit(ax, [y for line in ax.lines for y in line.get_ydata()])
    first = runs[0]
    every = first.save_every_steps or int(first.step_n[-1]) + 1
    saves = first.step_n[first.step_n % every == 0]
    marks = (first.eval_step_m, "|", "evaluation"), (saves, "^", "save")
    for steps, mark, label in marks:
        for ax in axs if len(steps) else ():
            ax.plot(
                steps, np.zeros(len(steps)), mark, color="0.25", ms=7, clip_on=False,
                label=label,
            )  # fmt: skip
    axs[0].set_title("throughput, without the time of evaluations and saves")
    axs[0].legend(loc="lower right", ncols=2)
    return figure


def smooth(y_n: np.ndarray) -> np.ndarray:
    """Smooth a curve by a centred moving mean over a fiftieth of the run, of the finite
    values."""
    window = np.ones(2 * (len(y_n) // SMOOTH_SHARE // 2) + 1)
    is_good = np.isfinite(y_n)
    sums = np.convolve(np.where(is_good, y_n, 0.0), window, "full")
    counts = np.convolve(is_good.astype(float), window, "full")
    half = len(window) // 2
    part = slice(half, half + len(y_n))
    with np.errstate(invalid="ignore"):
        return sums[part] / np.where(counts[part] > 0, counts[part], np.nan)


def _fit(ax, y: list) -> None:
    """Set the y axis from zero to 1.15 times the 99th percentile.

    The first step of a process takes far longer than the rest, and may lie outside.
    """
    y = np.array(y)[np.isfinite(y)]
    ax.set_ylim(0, 1.15 * np.percentile(y, 99) if y.size else 1)


if __name__ == "__main__":
    sys.exit(main())
