"""A figure of a plan and the loads before and after it: heat maps of all layers, then
the devices of one layer with the experts in their slots."""

import dataclasses

import numpy as np

from moejax.perf.traffic import over_mean
from moejax.plan.expert_plan import ExpertPlan
from tools.run_page.page import COLORS

MAX_LOG2 = 2.0
"""Logarithm of the load over the mean at which COLORS end."""
MAX_HEAT_ROWS = 32
GREY, BLUE = "0.72", "#0072b2"
REPLICA_COLORS = "tab20"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A plan, and the rows that each device computes before and under it: [l, w], by
    layer and device."""

    title: str
    """Policy, digest, and the load max/mean of the shown layer before and after."""
    source: str
    """Where the plan and the loads come from."""
    names: tuple[str, str]
    """Names of `before` and `after` in the figure."""
    layers: tuple[int, ...]
    before_rows_lw: np.ndarray
    after_rows_lw: np.ndarray
    after: ExpertPlan
    shown: int
    """Index of the layer whose slots are drawn."""

    @property
    def num_devices(self) -> int:
        return self.after_rows_lw.shape[1]

    @property
    def slot_table_ws(self) -> np.ndarray:
        """Experts of the shown layer, by device and slot; -1 is an empty slot. Trailing
        slots that are empty on every device are left out."""
        row_p = self.after.slot_to_expert_lp[self.shown]
        table_ws = row_p.reshape(self.num_devices, -1)
        return table_ws[:, : 1 + np.flatnonzero((table_ws >= 0).any(axis=0))[-1]]


def draw(comparison: Comparison):
    """Return the figure of a comparison."""
    from matplotlib.figure import Figure

    num_layers = min(len(comparison.layers), MAX_HEAT_ROWS)
    num_slots = comparison.slot_table_ws.shape[1]
    heights = (max(1.2, 0.5 + 0.24 * num_layers), 1.7, 0.35 + 0.27 * num_slots)
    width = float(np.clip(3.0 + 0.42 * comparison.num_devices, 8.0, 16.0))
    figure = Figure(figsize=(width, sum(heights) + 1.6), layout="constrained")
    figure.suptitle(f"{comparison.title}\n{comparison.source}", fontsize=11)
    top, bottom = figure.subfigures(2, 1, height_ratios=(heights[0], sum(heights[1:])))
    heat_axs = top.subplots(1, 2, sharey=True)
    for ax, rows_lw, name in zip(
        heat_axs,
        (comparison.before_rows_lw, comparison.after_rows_lw),
        comparison.names,
    ):
        mesh = _heat(ax, over_mean(rows_lw), comparison, name)
    heat_axs[0].set_ylabel("layer")
    bar = top.colorbar(mesh, ax=list(heat_axs), label="load / mean", extend="both")
    ticks = {-2: "1/4", -1: "1/2", 0: "1", 1: "2", 2: "4"}
    if num_layers < 4:
        ticks = {-2: "1/4", 0: "1", 2: "4"}
    bar.set_ticks(list(ticks), labels=list(ticks.values()))
    bars, slots = bottom.subplots(2, 1, sharex=True, height_ratios=heights[1:])
    _bars(bars, comparison)
    _slots(slots, comparison)
    return figure


def _heat(ax, ratio_lw: np.ndarray, comparison: Comparison, name: str):
    from matplotlib.colors import LinearSegmentedColormap

    rgb = [tuple(part / 255 for part in color) for color in COLORS]
    map_ = LinearSegmentedColormap.from_list("load", rgb, N=33)
    num_layers, num_devices = ratio_lw.shape
    log2_lw = np.log2(np.maximum(ratio_lw, 2**-MAX_LOG2))
    mesh = ax.pcolormesh(
        np.arange(num_devices + 1) - 0.5, np.arange(num_layers + 1) - 0.5, log2_lw,
        cmap=map_, vmin=-MAX_LOG2, vmax=MAX_LOG2, edgecolors="white", linewidth=0.4,
    )  # fmt: skip
    worst = ratio_lw.max(axis=1)
    ax.set_title(f"{name}: device max/mean {worst.min():.2f} to {worst.max():.2f}"
                 if num_layers > 1 else f"{name}: device max/mean {worst[0]:.2f}",
                 fontsize=10)  # fmt: skip
    ax.set_xlabel("device")
    every = -(-num_layers // MAX_HEAT_ROWS)
    shown = range(0, num_layers, every)
    ax.set_yticks(list(shown), labels=[str(comparison.layers[i]) for i in shown])
    ax.set_ylim(num_layers - 0.5, -0.5)
    _device_ticks(ax, num_devices)
    return mesh


def _bars(ax, comparison: Comparison) -> None:
    device_w = np.arange(comparison.num_devices)
    pairs = (
        (comparison.before_rows_lw, -0.2, GREY),
        (comparison.after_rows_lw, 0.2, BLUE),
    )
    for (rows_lw, shift, color), name in zip(pairs, comparison.names):
        ratio_w = over_mean(rows_lw)[comparison.shown]
        label = f"{name}: device max/mean {ratio_w.max():.2f}"
        ax.bar(device_w + shift, ratio_w, 0.4, color=color, label=label)
    ax.axhline(1.0, color="0.2", lw=0.8, ls="--")
    ax.set_ylabel("load / mean")
    ax.set_title(f"layer {comparison.layers[comparison.shown]}, by device", fontsize=10)
    ax.legend(fontsize=9, frameon=False)
    ax.spines[["top", "right"]].set_visible(False)


def _slots(ax, comparison: Comparison) -> None:
    """Draw slots down and devices to the right. The replicas of an expert have one
    color."""
    table_ws = comparison.slot_table_ws
    num_devices, num_slots = table_ws.shape
    color_of = replica_colors(table_ws)
    size = float(np.clip(300 / num_devices, 4.5, 9.0))
    for (device, slot), expert in np.ndenumerate(table_ws):
        _cell(ax, device, slot, int(expert), color_of.get(int(expert)), size)
    ax.set_xlim(-0.5, num_devices - 0.5)
    ax.set_ylim(num_slots - 0.5, -0.5)
    ax.set_yticks(range(num_slots))
    ax.set_ylabel("slot")
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    _device_ticks(ax, num_devices)
    hatched = "; hatched slots are empty" if (table_ws < 0).any() else ""
    ax.set_xlabel(
        f"device (numbers in slots: experts; one color: replicas of one{hatched})"
    )


def _cell(ax, device: int, slot: int, expert: int, color, size: float) -> None:
    from matplotlib.patches import Rectangle

    face = color or "0.95"
    style = {"facecolor": face, "edgecolor": "white", "lw": 1.2}
    if expert < 0:
        style = {"facecolor": "white", "edgecolor": "0.85", "hatch": "////", "lw": 0}
    ax.add_patch(Rectangle((device - 0.5, slot - 0.5), 1, 1, **style))
    if expert >= 0:
        ax.text(
            device, slot, str(expert), ha="center", va="center_baseline", fontsize=size,
            color="black",
        )  # fmt: skip


def replica_colors(table_ws: np.ndarray) -> dict[int, tuple]:
    """Return a color for each expert with several replicas. Those with most replicas
    get the first colors."""
    from matplotlib import colormaps

    copies_e = np.bincount(table_ws[table_ws >= 0])
    replicated = [int(e) for e in np.argsort(-copies_e, kind="stable")]
    replicated = [e for e in replicated if copies_e[e] > 1]
    # Every other color of tab20 is light, so that black text on it is easy to read.
    palette = colormaps[REPLICA_COLORS].colors
    palette = [*palette[1::2], *palette[::2]]
    return {e: palette[i % len(palette)] for i, e in enumerate(replicated)}


def _device_ticks(ax, num_devices: int) -> None:
    every = 1 if num_devices <= 16 else -(-num_devices // 16)
    ax.set_xticks(range(0, num_devices, every))
