"""Test the guard of the ragged transport: what it refuses, and what it warns of."""

import os
import re
from unittest import mock

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType

from moejax.axes import AXES
from moejax.moe.mesh_roles import on_mesh
from moejax.plan.layout import Layout
from tests.support.run_main import command
from train.main import main
from train.step.gpu_options import LATENCY_HIDING
from train.step.ragged import MAX_RANKS, check_ragged, hides_latency

OFF = {"XLA_FLAGS": f"--{LATENCY_HIDING}=false"}


def mesh_layout(ranks: int, transport="ragged"):
    mesh = AbstractMesh((1, 1, ranks, 1), AXES, axis_types=(AxisType.Auto,) * 4)
    return on_mesh(mesh, Layout(ranks, ranks, 1, 8, transport))


@pytest.mark.parametrize(
    ("flags", "is_on"),
    [
        ("", True),
        ("--xla_gpu_autotune_level=0", True),
        (f"--{LATENCY_HIDING}", True),
        (f"--{LATENCY_HIDING}=true", True),
        (f"--{LATENCY_HIDING}=False", False),
        (f"-{LATENCY_HIDING}=0", False),
        (f"--{LATENCY_HIDING}=true --{LATENCY_HIDING}=false", False),
        (f"--{LATENCY_HIDING}=false --{LATENCY_HIDING}=true", True),
    ],
)
def test_the_scheduler_is_on_unless_the_user_turns_it_off(flags, is_on):
    assert hides_latency({"XLA_FLAGS": flags}) == is_on


def test_the_level_of_optimization_turns_the_scheduler_on():
    level = jax.config.jax_optimization_level
    try:
        jax.config.update("jax_optimization_level", "O1")
        assert hides_latency(OFF)
    finally:
        jax.config.update("jax_optimization_level", level)


def test_what_is_known_to_go_wrong_is_refused_and_the_rest_warned_of():
    with pytest.raises(ValueError, match=r"marin 8077.*padded', or set XLA_FLAGS="):
        check_ragged(mesh_layout(8), "gpu", {})
    with pytest.raises(ValueError, match=r"47283\), and the group has 64: use"):
        check_ragged(mesh_layout(2 * MAX_RANKS), "gpu", OFF)
    assert len(check_ragged(mesh_layout(MAX_RANKS), "gpu", OFF)) == 2
    assert check_ragged(mesh_layout(64, "padded"), "gpu", {}) == []
    assert check_ragged(mesh_layout(8), "cpu", {}) == []


def test_a_dry_run_refuses_and_warns_too(tmp_path, capfd):
    params = ["Dispatch.transport = 'ragged'", "Train.num_simulated_devices = None"]
    args = command(tmp_path, *params, flags=["--dry_run", "--target=h100"])[2:]
    with mock.patch.dict(os.environ):
        os.environ.pop("XLA_FLAGS")
        assert main(args) == 2
    assert re.fullmatch(r"error: .*marin 8077.*\n", capfd.readouterr().err)
    with mock.patch.dict(os.environ, OFF):
        assert main(args) == 0
    assert capfd.readouterr().out.count("RAGGED TRANSPORT: ") == 2
