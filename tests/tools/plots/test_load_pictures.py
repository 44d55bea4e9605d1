"""Test the pictures of loads over the steps of a run: marks, names and gaps."""

import io
import json

import numpy as np
import pytest

from tests.support.metrics_lines import (
    DECISIONS,
    balanced_lines,
    decided,
    log_lines,
    write_run,
)
from tools import plot_run
from tools.plots import load_pictures
from tools.plots.run_arrays import Adoption, read_run

pytestmark = pytest.mark.filterwarnings("error")  # matplotlib warns of ugly layouts


def test_marks_are_at_the_steps_of_adoptions(tmp_path):
    run = read_run(write_run(tmp_path / "run", balanced_lines(40, DECISIONS)))
    for figure in (load_pictures.draw_load(run), load_pictures.draw_devices(run)):
        axs = [
            ax for ax in figure.axes if ax.get_ylabel().endswith(("device", "layer"))
        ]
        assert len(axs) >= 2
        for ax in axs:
            styles = {}
            for line in ax.lines:
                styles.setdefault(line.get_label(), []).append(list(line.get_xdata()))
            marks = {name: at for name, at in styles.items() if name[0] != "_"}
            assert marks == {
                "swap adopted": [[14, 14]],
                "relayout adopted": [[34, 34]],
            }
        names = [text.get_text() for text in figure.axes[0].texts]
        assert sorted(names) == ["relayout slots 2→3", "swap"]
        (legend,) = figure.legends
        assert {"swap adopted", "relayout adopted"} <= {
            text.get_text() for text in legend.texts
        }


def test_many_swaps_are_ticks_without_names(tmp_path):
    steps = range(3, 3 + 2 * load_pictures.MAX_LINES + 2, 2)
    decisions = [decided("swap", step - 2, step) for step in steps]
    run = read_run(write_run(tmp_path / "run", balanced_lines(90, decisions)))
    ax = load_pictures.draw_devices(run).axes[0]
    (ticks,) = ax.lines
    assert list(ticks.get_xdata()) == list(steps)
    assert ticks.get_label() == f"swap adopted, {len(steps)} times"
    assert not ax.texts


def test_names_of_marks_do_not_overlap_and_relayouts_come_first():
    swaps = [Adoption(step, "swap", step, "") for step in range(0, 1000, 10)]
    relayout = Adoption(503, "relayout", 500, "slots 2→3")
    named = load_pictures._choose_named((0, 1000), [*swaps, relayout])
    assert named[0] == relayout
    steps = np.sort([adoption.step for adoption in named])
    assert 10 < len(steps) < 30
    assert np.diff(steps).min() > 4 * load_pictures.LETTER_SHARE * 1000


def test_devices_are_shown_from_the_step_that_first_recorded_them(tmp_path):
    old = []
    for line in log_lines(40):
        record = json.loads(line)
        record.pop("device_max_over_mean", None)
        record.pop("rows_lw", None)
        old.append(json.dumps(record))
    folder = write_run(tmp_path / "old", old)
    assert plot_run.main([str(folder)]) == 0
    assert not (folder / "devices.png").exists()
    assert (folder / "load.png").exists()
    run = read_run(write_run(tmp_path / "both", old[:20] + log_lines(40)[20:]))
    is_nan_n = np.isnan(run.device_ratio_nl).all(axis=1)
    assert is_nan_n.tolist() == [True] * 20 + [False] * 20
    figure = load_pictures.draw_load(run)
    worst = figure.axes[0].lines[0]
    assert np.array_equal(np.isnan(worst.get_ydata()), is_nan_n)
    figure.savefig(io.BytesIO())
