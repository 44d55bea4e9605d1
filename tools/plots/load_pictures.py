"""Pictures of the load of experts and devices over the steps of a run.

Letters in names: n steps, q columns of a picture, l layers, e experts, w devices.
"""

import numpy as np

from tools.plots.run_arrays import Adoption, RunArrays
from train.logs.heat_map import COLORS, MAX_LOG2

MAX_COLUMNS = 400
MAX_TABLE_COLUMNS = 64
"""Maximum number of columns in pictures with many rows, which keeps the files small."""
MAX_LAYERS = 4
LETTER_SHARE = 0.0089
"""Width of a letter in the name of a mark, over the width of the axes."""
MAX_LINES = 30
"""Maximum number of swaps that are drawn as lines. More are drawn as ticks at the edge,
so that they do not hide the load."""
MAX_DEVICE_LOG2 = 1.0
"""Range of the device colors: half the mean to twice the mean. It is narrower than that
of experts, which are less even than devices."""
LINE_COLOR, THRESHOLD_COLOR = "#0072b2", "#d55e00"


def new_figure(num_rows: int, x_label: str, y_labels: list[str], first: float = 1.0):
    """Return a figure as wide as a README, and its axes from top to bottom. The first
    axes are `first` times as high as the others."""
    from matplotlib.figure import Figure

    height = 3.4 if num_rows == 1 else 1.2 + 1.35 * (num_rows - 1 + first)
    figure = Figure(figsize=(7.6, height), layout="constrained")
    heights = [first] + [1.0] * (num_rows - 1)
    axs = figure.subplots(
        num_rows, 1, sharex=True, squeeze=False, height_ratios=heights
    )
    for ax, label in zip(axs[:, 0], y_labels):
        ax.set_ylabel(label)
        ax.spines[["top", "right"]].set_visible(False)
    axs[-1, 0].set_xlabel(x_label)
    axs[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    return figure, axs[:, 0]


def draw_load(run: RunArrays):
    """Draw the fullest device as a line, and below it the fullest device and the
    fullest expert by layer. A run that recorded no devices has only the last part."""
    parts = {"devices": run.device_ratio_nl, "experts": run.ratio_nl}
    parts = {what: x_nl for what, x_nl in parts.items() if np.isfinite(x_nl).any()}
    has_line = "devices" in parts
    labels = ["device\nmax/mean"] * has_line + [f"{what}\nlayer" for what in parts]
    figure, axs = new_figure(len(labels), "step", labels, 1.6 if has_line else 1.0)
    groups = _groups(len(run.step_n), MAX_COLUMNS)
    x = _edges([run.step_n[part[0]] for part in groups], run.step_n[-1])
    for ax, ratio_nl in zip(axs[has_line:], parts.values()):
        mesh = _by_layer(ax, x, _means(ratio_nl, groups))
        figure.colorbar(mesh, ax=ax, label="max/mean", extend="max", aspect=10)
    if has_line:
        _line(axs[0], x, _means(run.device_ratio_nl, groups), run)
        axs[0].set_title(
            f"{run.name}: device max/mean, the fullest device's rows over the mean"
        )
    else:
        axs[0].set_title(
            f"{run.name}: expert max/mean, the most chosen expert over the mean"
        )
    _mark(figure, axs, run.adoptions)
    return figure


def _by_layer(ax, x: np.ndarray, ratio_ql: np.ndarray):
    """Draw the ratios of all layers with a color scale of their own, since experts are
    far less even than devices."""
    from matplotlib import colormaps

    high = max(1.1, np.nanpercentile(ratio_ql, 99))
    mesh = ax.pcolormesh(
        x, np.arange(ratio_ql.shape[1] + 1) - 0.5, ratio_ql.T, vmin=1, vmax=high,
        cmap=colormaps["cividis"].resampled(32),
    )  # fmt: skip
    _row_ticks(ax, ratio_ql.shape[1])
    return mesh


def _line(ax, x: np.ndarray, ratio_ql: np.ndarray, run: RunArrays) -> None:
    """Draw the worst layer as a line, the band down to the best layer, the balancer's
    threshold, and the spans of relayouts from decision to adoption."""
    mid_q = (x[:-1] + x[1:]) / 2
    worst_q, best_q = (pick(ratio_ql, axis=1) for pick in (np.max, np.min))
    if ratio_ql.shape[1] > 1:
        ax.fill_between(mid_q, best_q, worst_q, color=LINE_COLOR, alpha=0.25, lw=0)
    ax.plot(mid_q, worst_q, color=LINE_COLOR, lw=1.2, label="worst layer")
    if run.act_above is not None:
        label = f"the balancer acts above {run.act_above:g}"
        ax.axhline(run.act_above, color=THRESHOLD_COLOR, lw=1.2, label=label)
    for adoption in run.adoptions:
        if adoption.kind == "relayout":
            span = adoption.collected_step, adoption.step
            label = "relayout decided, compiling while steps continue"
            ax.axvspan(*span, color="0.5", alpha=0.2, lw=0, label=label)
    ax.set_ylim(bottom=1)


def draw_devices(run: RunArrays):
    """Draw the rows of each device over the mean of its layer."""
    figure, axs, mesh = _tables(
        run.rows_step_q, run.rows_qlw, "device", MAX_DEVICE_LOG2
    )
    axs[0].set_title(f"{run.name}: rows of each device over the mean of its layer")
    _color_bar(figure, axs, mesh, "rows / mean")
    _mark(figure, axs, run.adoptions)
    return figure


def draw_experts(run: RunArrays):
    """Draw the load of each expert over the mean of its layer."""
    figure, axs, mesh = _tables(run.load_step_q, run.load_qle, "expert", MAX_LOG2)
    axs[0].set_title(f"{run.name}: load of each expert over the mean of its layer")
    _color_bar(figure, axs, mesh, "load / mean")
    return figure


def _tables(step_q: np.ndarray, load_qlx: np.ndarray, row: str, max_log2: float):
    from matplotlib.colors import LinearSegmentedColormap

    num_layers, num_rows = load_qlx.shape[1:]
    shown = np.unique(np.linspace(0, num_layers - 1, MAX_LAYERS).round().astype(int))
    names = [f"layer {layer}\n{row}" for layer in shown]
    figure, axs = new_figure(len(shown), "step", names)
    rgb = [tuple(part / 255 for part in color) for color in COLORS]
    map_ = LinearSegmentedColormap.from_list("load", rgb, N=33)
    groups = _groups(len(step_q), MAX_TABLE_COLUMNS)
    load_qlx = _means(load_qlx, groups)
    x = _edges([step_q[part[0]] for part in groups], step_q[-1])
    for ax, layer in zip(axs, shown):
        log2_qx = np.log2(np.maximum(load_qlx[:, layer], 2**-max_log2))
        mesh = ax.pcolormesh(
            x, np.arange(num_rows + 1) - 0.5, log2_qx.T, cmap=map_,
            vmin=-max_log2, vmax=max_log2,
        )  # fmt: skip
        _row_ticks(ax, num_rows)
    return figure, axs, mesh


def _color_bar(figure, axs, mesh, label: str) -> None:
    bar = figure.colorbar(
        mesh, ax=list(axs), label=label, extend="both", aspect=10 * len(axs)
    )
    high = mesh.get_clim()[1]
    ticks = [high * part for part in (-1, -0.5, 0, 0.5, 1)]
    bar.set_ticks(ticks, labels=[f"{2.0**tick:.2g}" for tick in ticks])


def _mark(figure, axs, adoptions: tuple[Adoption, ...]) -> None:
    """Mark adoptions as lines through all axes, and add a legend below the figure.

    Lines are named above the first axes where there is room. More than MAX_LINES
    adoptions of a kind become ticks without a name. The legend also lists what the
    first axes show.
    """
    named: list[Adoption] = []
    for kind, style, width in (("swap", (0, (4, 2)), 0.9), ("relayout", "-", 1.7)):
        of_kind = [adoption for adoption in adoptions if adoption.kind == kind]
        steps = [adoption.step for adoption in of_kind]
        named += of_kind if len(steps) <= MAX_LINES else []
        label = f"{kind} adopted" + f", {len(steps)} times" * (len(steps) > 1)
        for ax in axs if steps else ():
            if len(steps) > MAX_LINES:
                across = ax.get_xaxis_transform()
                ax.plot(steps, np.ones(len(steps)), "|", color="k", ms=7, mew=0.5,
                        transform=across, clip_on=False, label=label)  # fmt: skip
            else:
                for step in steps:
                    ax.axvline(step, color="w", lw=width + 1.4, alpha=0.7)
                    ax.axvline(step, color="k", lw=width, ls=style, label=label)
    for adoption in _choose_named(axs[0].get_xlim(), named):
        text, y = _text(adoption), (adoption.step, 1)
        axs[0].annotate(
            text, y, (0, 3), xycoords=("data", "axes fraction"), fontsize=7.5,
            textcoords="offset points", ha="center",
        )  # fmt: skip
    if adoptions:
        axs[0].set_title(axs[0].get_title(), pad=17)
    handles, labels = axs[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles))
    if unique:
        figure.legend(
            unique.values(), unique, loc="outside lower center", ncols=2, fontsize=9
        )


def _text(adoption: Adoption) -> str:
    return f"{adoption.kind} {adoption.changes}".rstrip()


def _choose_named(limits: tuple, adoptions: list[Adoption]) -> list[Adoption]:
    """Return the adoptions whose names fit beside one another; relayouts come before
    swaps."""
    per_letter = (limits[1] - limits[0]) * LETTER_SHARE
    taken: list[tuple[float, float]] = []
    named = []
    for adoption in sorted(adoptions, key=lambda a: a.kind != "relayout"):
        half = per_letter * (len(_text(adoption)) + 2) / 2
        low, high = adoption.step - half, adoption.step + half
        if all(high < other_low or other_high < low for other_low, other_high in taken):
            taken.append((low, high))
            named.append(adoption)
    return named


def _means(x_nz: np.ndarray, groups: list[np.ndarray]) -> np.ndarray:
    """Return the mean over each group's rows of the finite values; NaN where there are
    none."""
    is_good_nz = np.isfinite(x_nz)
    x_nz = np.where(is_good_nz, x_nz, 0.0)
    counts_qz = np.array([is_good_nz[part].sum(axis=0) for part in groups])
    sums_qz = np.array([x_nz[part].sum(axis=0) for part in groups])
    return np.where(counts_qz, sums_qz / np.maximum(counts_qz, 1), np.nan)


def _groups(count: int, limit: int) -> list[np.ndarray]:
    """Return the indices 0 .. count - 1 in order, cut into at most `limit` groups."""
    return np.array_split(np.arange(count), min(count, limit))


def _edges(first_steps: list, last_step: int) -> np.ndarray:
    """Return the edges of a picture's columns, in steps: where each begins, and where
    the last ends."""
    width = np.median(np.diff(first_steps)) if len(first_steps) > 1 else 1
    return np.array([*first_steps, max(last_step, first_steps[-1]) + width])


def _row_ticks(ax, count: int) -> None:
    ax.set_yticks(range(0, count, max(1, 2 ** int(np.ceil(np.log2(count / 6))))))
    ax.invert_yaxis()
