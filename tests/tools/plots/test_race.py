"""Test the pictures and tables of a race on made results of three arms."""

import json

import pytest
from PIL import Image

from tools.plots import race
from tools.testbed import arms

pytestmark = pytest.mark.filterwarnings("error")  # matplotlib warns of ugly layouts

STEPS = 30


def result(sec: float, ratio: float) -> dict:
    """Return the result of an arm as tools/testbed/race.py writes it; home takes 2 s
    beside it."""
    parts = dict.fromkeys(race.PARTS, 0.0) | {"experts": 0.6 * sec, "rest": 0.4 * sec}
    spread = {"p50": 2 / sec, "min": 1.9 / sec, "max": 2.1 / sec}
    figures = {
        "sec_per_step": sec, "home_sec_per_step": 2.0, "speedup": 2 / sec,
        "speedup_of_blocks": spread, "max_over_mean_p50": ratio, "num_swaps": 3,
        "num_relayouts": 0, "dropped_share": 0.0, "bytes_of_slots": 2**20,
        "bytes_of_buffers": 2**21, "parts_sec": parts,
        "prediction": {"modelled_step_msec": 700.0, "step_msec": 1e3 * sec,
                       "correlation": None, "bias": -0.3},
    }  # fmt: skip
    series = {
        "step": list(range(3, 3 + STEPS)), "sec": [sec] * STEPS,
        "max_over_mean": [ratio] * STEPS, "home_max_over_mean": [4.0] * STEPS,
        "adopted": [5],
    }  # fmt: skip
    return {"figures": figures, "arm": series}


RESULTS = {
    "forced": result(0.8, 1.0), "home": result(2.0, 4.0), "micromoe": result(1.0, 1.01),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "jump_seed0"
    path.mkdir()
    for name, made in RESULTS.items():
        (path / f"{name}.json").write_text(json.dumps(made))
    return path


def test_pictures_and_tables(folder, tmp_path, capsys):
    out = tmp_path / "pictures"
    assert race.main([str(folder), f"--out={out}", "--json"]) == 0
    for name in ("jump_seed0_load.png", "jump_seed0_time.png"):
        with Image.open(out / name) as image:
            assert image.width > 500
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [
        "forced", "micromoe", "home", "forced", "home", "micromoe",
    ]  # fmt: skip
    assert rows[1].startswith("| `micromoe` | 1.000 | 2.00 (1.90 to 2.10) | 80% | 1.01")
    assert rows[5].endswith("| 400 | 700 of 1000 ms | - |")
    assert json.loads(lines[-1])["out"] == [
        str(out / f"jump_seed0_{name}.png") for name in ("load", "time")
    ]


def test_every_arm_has_its_panel(folder):
    made = dict.fromkeys(arms.ARMS, RESULTS["home"])
    figure = race.draw_load(made)
    titles = [axis.get_title() for axis in figure.axes if axis.get_visible()]
    assert titles == list(arms.ARMS)
    for axis in figure.axes:
        assert axis.get_ylim() == pytest.approx((0.9, 4.2))


def test_a_folder_without_results_is_one_line(tmp_path, capsys):
    assert race.main([str(tmp_path)]) == 2
    assert (
        "has no result of a race: run tools/testbed/run.py" in capsys.readouterr().err
    )
    (tmp_path / "home.json").write_text('{"figures": {}}')
    assert race.main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "home.json is not the result of an arm" in error
    assert error.count("\n") == 1
