"""Pictures of predicted steps: stacked bars of their parts, and curves over devices."""

import dataclasses
import pathlib
from collections.abc import Sequence

from tools.simulated.report import how
from tools.simulated.scale import Size
from tools.simulated.what_if import Answer

COLORS = {
    "experts": "#4c78a8", "blocks": "#72b7b2", "head": "#9ecae9", "weights": "#bab0ac",
    "wait": "#e45756", "exchange": "#f58518", "copies": "#eeca3b", "dense": "#b279a2",
    "dc": "#9d755d",
}  # fmt: skip
"""Colour of each part of a step: work in blue and grey, waiting and links in others."""


def draw_answers(found: Sequence[Answer], title: str, path: pathlib.Path) -> None:
    """Draw a bar for each answer, of the microseconds that a token takes by part, and
    write the picture."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(11, 1.6 + 0.5 * len(found)))
    names = [
        f"{' x '.join(map(str, answer.cfg.mesh.sizes))}\n{how(answer)}"
        for answer in found
    ]
    left = [0.0] * len(found)
    for part, color in COLORS.items():
        usec = [_usec(answer, part) for answer in found]
        if max(usec) > 0:
            axes.barh(names, usec, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, usec)]
    axes.invert_yaxis()
    axes.set_xlabel("predicted microseconds for a token, all devices together")
    axes.set_title(title, fontsize=10)
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    below = -0.35 / (1 + 0.25 * len(found))
    axes.legend(
        ncols=len(COLORS),
        fontsize=8,
        loc="upper center",
        bbox_to_anchor=(0.4, below),
        frameon=False,
    )
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def draw_sizes(found: Sequence[Size], path: pathlib.Path) -> None:
    """Draw tokens per second and device over devices, and write the picture."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    devices = [size.cluster.num_devices for size in found]
    for name, color in (("plain", "#bab0ac"), ("best", "#4c78a8")):
        rates = [
            getattr(size, name).tok_per_sec / size.cluster.num_devices for size in found
        ]
        axes.plot(devices, rates, marker="o", color=color, label=name)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("devices")
    axes.set_ylabel("predicted tokens per second and device")
    axes.set_title(found[-1].cluster.name, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


def _pyplot():
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def _usec(answer: Answer, part: str) -> float:
    """Return the microseconds of a part for one token."""
    share = dataclasses.asdict(answer.time)[part] / answer.time.total
    return 1e6 * share * answer.sec_per_token
