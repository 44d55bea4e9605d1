"""Test the checks of collectives: what is right passes on meshes of all kinds, and what
is wrong is found on the devices where it is."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moejax.axes import make_mesh
from moejax.moe.exchange.transport import TRANSPORTS
from moejax.resolve.resolved import resolve
from tests.support.planted import swap_ends
from tests.support.run_main import TOY, corpus
from train.config import gin_reader
from train.doctor import collectives
from train.doctor.collectives import collective_checks, run_collective

MESHES = {
    "tensor": ("Mesh.data = 1", "Mesh.tensor = 2", "Model.num_kv_heads = 2"),
    "s1": (
        "Mesh.data = 1", "Mesh.tensor = 2", "Model.num_kv_heads = 2",
        "Dispatch.schedule = 's1'", "Dispatch.expert_shards = 4",
    ),
    "domain": (
        "Mesh.data = 1", "Mesh.dc = 2", "Dispatch.group = 'dc_expert'",
        "Dispatch.domain = (2, 1)",
    ),
    "bfloat16": ("Model.compute_dtype = 'bfloat16'",),
}  # fmt: skip


@functools.cache
def make_run(*params: str):
    cfg = gin_reader.load([str(TOY)], [f"Data.corpus = '{corpus()}'", *params])
    return resolve(cfg, make_mesh(cfg.mesh))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n != "s1")) for n in MESHES]
)
def test_what_is_right_passes(name):
    run = make_run(*MESHES[name])
    checks = collective_checks(run)
    outcomes = [run_collective(check, run.mesh_layout.mesh) for check in checks]
    assert [x for x in outcomes if not x.is_right or x.devices] == []
    assert len({x.name for x in outcomes}) == len(checks) > 6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["padded", "hierarchical"])
def test_rows_in_the_wrong_order_are_found(monkeypatch, name):
    option = f"Dispatch.transport = '{name}'"
    run = make_run(
        "Mesh.data = 1", "Mesh.dc = 2", "Dispatch.group = 'dc_expert'", option
    )
    monkeypatch.setitem(TRANSPORTS, name, swap_ends(TRANSPORTS[name]))
    check, *_ = collective_checks(run)
    found = run_collective(check, run.mesh_layout.mesh)
    assert not found.is_right
    assert len(found.devices) == 8
    assert " came as " in str(found)
    avoided_by = {
        "padded": "no option",
        "hierarchical": "Dispatch.transport = 'padded'",
    }
    assert str(found).endswith(f"{avoided_by[name]} avoids it")


@pytest.mark.slow
def test_one_wrong_bit_on_one_device_is_found(monkeypatch):
    """A sum that is one too large on one of eight devices."""
    run = make_run()
    name = "psum in float32 along expert"
    (check,) = [c for c in collective_checks(run) if c.name == name]

    def one_off(place):
        ((came, expected),) = check.run(place)
        return [(came.at[3, 5].add(place.me == 6), expected)]

    wrong = dataclasses.replace(check, run=one_off)
    found = run_collective(wrong, run.mesh_layout.mesh)
    assert (found.error, found.devices) == (1.0, (6,))


def test_peers_are_in_the_order_of_the_axes():
    devices = np.array(jax.devices()).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("a", "b"))
    assert collectives._peers(mesh, ("b",))[5].tolist() == [4, 5, 6, 7]
    assert collectives._peers(mesh, ("a",))[5].tolist() == [1, 5]
    assert collectives._peers(mesh, ("a", "b"))[5].tolist() == list(range(8))
    assert collectives._peers(mesh, ("b", "a"))[0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_a_run_on_one_device_has_no_collectives():
    cfg = gin_reader.load(
        [str(TOY)],
        ["Mesh.data = 1", "Mesh.expert = 1", "Train.num_simulated_devices = None"],
    )
    run = resolve(cfg, make_mesh(cfg.mesh, jax.devices()[:1]))
    assert collective_checks(run) == []
