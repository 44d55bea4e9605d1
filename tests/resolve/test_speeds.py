"""A calibration that does not fit a run is refused with the name of its file."""

import dataclasses

import pytest

from moejax.resolve.speeds import load_calibration, make_cost_model
from tests.support.calibrations import TWO_LEVELS
from tests.support.resolved import make_run
from tests.support.run_main import TOY
from train.config import gin_reader

MESH = (
    "Mesh.data = 1", "Mesh.expert = 4", "Mesh.tensor = 2", "Model.num_kv_heads = 2",
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"mesh": {**TWO_LEVELS.mesh, "expert": 8}}, "measured on mesh"),
        ({"device_kind": "other"}, "measured on 'other'"),
        ({"compute_dtype": "bfloat16"}, "measured in bfloat16"),
        ({"collectives": {}}, "has no all_to_all over the 'expert' axis"),
        (None, "there is no such file"),
    ],
)
def test_the_file_of_a_calibration_that_does_not_fit_is_named(
    change, problem, tmp_path
):
    path = tmp_path / "a.json"
    if change is not None:
        path.write_text(dataclasses.replace(TWO_LEVELS, **change).to_json())
    cfg = gin_reader.load([TOY], [*MESH, f"Balance.calibration = '{path}'"])
    with pytest.raises(ValueError, match=f"Balance.calibration='{path}': .*{problem}"):
        make_cost_model(cfg, load_calibration(cfg, "paper"))


def test_a_named_schedule_needs_its_lines_before_anything_is_compiled(tmp_path):
    path = tmp_path / "a.json"
    to_all = {"all_to_all": TWO_LEVELS.collectives["all_to_all"]}
    lines = dataclasses.replace(TWO_LEVELS, collectives=to_all, device_kind="cpu")
    path.write_text(lines.to_json())
    words = [*MESH, f"Balance.calibration = '{path}'", "Dispatch.schedule = 's1h'"]
    problem = f"Balance.calibration='{path}': .*no all_gather over the 'tensor' axis"
    with pytest.raises(ValueError, match=problem):
        make_run(gin_reader.load([TOY], words))
