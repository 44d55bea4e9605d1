"""Test that the wrapper around gin reads valid files as gin does, and runs no code."""

import dataclasses
import json
import pathlib
import subprocess
import sys
from typing import Literal

import pytest

from moejax.config import Config, Train
from moejax.plan.layout import Topology
from train.config.gin_reader import ConfigError, load, render
from train.config.names import CLASSES, KINDS, convert

ROOT = pathlib.Path(__file__).resolve().parents[3]


def test_later_files_win_then_params_in_order(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.gin").write_text(
        "Train.seed = 1\nTrain.num_steps = 11\nData.seed = 7"
    )
    (tmp_path / "b.gin").write_text("Train.seed = 2\nTrain.num_steps = 12")
    files = [tmp_path / "a.gin", tmp_path / "b.gin"]
    config = load(files, ["Train.num_steps = 13", "Train.num_steps = 14"])
    assert (config.train.seed, config.train.num_steps, config.data.seed) == (2, 14, 7)
    assert load(files[::-1], []).train.seed == 1
    assert load([], []) == Config()


def test_macros_bind_late(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.gin").write_text("A = 5\nB = %A\nTrain.seed = %B\nData.seed = %A")
    assert load([tmp_path / "a.gin"]).train.seed == 5
    config = load([tmp_path / "a.gin"], ["A = 6"])
    assert (config.train.seed, config.data.seed) == (6, 6)


def test_include_is_relative_to_the_file_then_to_the_working_directory(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside.gin").write_text("Train.seed = 1\nTrain.num_steps = 3")
    (tmp_path / "beside.gin").write_text("Train.seed = 99")
    (tmp_path / "here.gin").write_text("Data.seed = 2")
    (tmp_path / "sub" / "top.gin").write_text(
        "include 'beside.gin'\ninclude 'here.gin'\nTrain:\n  num_steps = 4"
    )
    monkeypatch.chdir(tmp_path)
    config = load(["sub/top.gin"])
    assert (config.train.seed, config.data.seed, config.train.num_steps) == (1, 2, 4)
    assert load([], ["include 'here.gin'"]).data.seed == 2


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ([1, 2], tuple[int, ...], (1, 2)),
        ((1, 2), tuple[int, float], (1, 2.0)),
        ((), tuple[int, ...], ()),
        (None, tuple[int, int] | None, None),
        (2, Literal[1, 2], 2),
        (1, float, 1.0),
    ],
)
def test_convert_accepts(value: object, kind: object, expected: object) -> None:
    result = convert(value, kind)
    assert (result, repr(result)) == (expected, repr(expected))


def test_render_holds_every_field_and_loads_again(tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(
        load([ROOT / "configs" / "skewed_cpu.gin"]),
        train=Train(
            run_dir='it\'s "a"\n\\dir é', num_simulated_devices=2, peak_tflops=1e-30
        ),
        mesh=Topology(expert=2),
    )
    text = render(config)
    names = [line.split(" = ")[0] for line in text.splitlines() if line]
    assert sorted(names) == sorted(KINDS)
    classes = list(dict.fromkeys(name.split(".")[0] for name in names))
    assert classes == sorted(CLASSES)
    path = tmp_path / "saved.gin"
    path.write_text(text)
    assert load([path]) == config
    assert render(load([path])) == text
    changed = render(config, only_changed=True)
    assert load([], [changed]) == config
    assert "Mesh.expert = 2\n" in changed
    assert "Mesh.dc" not in changed
    assert render(Config(), only_changed=True) == ""


def test_loads_in_one_process_are_independent(tmp_path: pathlib.Path) -> None:
    tiny = [ROOT / "configs" / "tiny_cpu.gin"]
    first = load(tiny, ["Train.seed = 5"])
    for param in ("SEED = 3", "Train.seed = 'x'", "Train.seed = 3 4"):
        with pytest.raises(ConfigError):
            load(tiny, [param])
    assert load(tiny, ["Train.seed = 5"]) == first
    assert load(tiny).train.seed == 0
    assert load([]) == Config()


def test_gin_files_run_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "moejax_evil.py").write_text(f"open({str(mark)!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    dynamic = "from __gin__ import dynamic_registration\nimport subprocess\n"
    call = "Train.run_dir = @subprocess.getoutput()\nsubprocess.getoutput.cmd = "
    for text in (
        "import moejax_evil",
        "from moejax_evil import anything",
        "from __gin__ import dynamic_registration\nimport moejax_evil",
        f"{dynamic}{call}'touch {mark}'",
        f"{call}'touch {mark}'",
    ):
        (tmp_path / "evil.gin").write_text(text)
        for params in ([text], [f"include '{tmp_path / 'evil.gin'}'"]):
            with pytest.raises(ConfigError, match=r"is refused|no class subprocess"):
                load([], params)
    assert "moejax_evil" not in sys.modules
    assert not mark.exists()


def test_shipped_configs_load() -> None:
    for path in (ROOT / "configs").glob("*.gin"):
        config = load([path])
        assert load([], [render(config)]) == config


def test_load_needs_no_jax() -> None:
    script = """if True:
        import json, sys
        from train.config.gin_reader import load
        load(["configs/skewed_cpu.gin"], ["Train.num_steps = 5"])
        print(json.dumps(sorted(sys.modules)))
    """
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"jax", "jaxlib", "flax"} & set(json.loads(run.stdout))
