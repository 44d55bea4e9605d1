"""Test expert groups over the merged axes data and expert: float32 master parameters
move between all devices of a group, and layout and cost model describe the group.
test_equals_reference.py compares layers of such groups with the reference."""

import dataclasses

import jax
import numpy as np
import pytest

from moejax.axes import everywhere, make_mesh, sharding
from moejax.config import Config, Dispatch, Moe
from moejax.moe.mesh_roles import on_mesh
from moejax.moe.weights.migrate import exchanges, move, reshard
from moejax.moe.weights.stores import EXPERT_PARAMS
from moejax.perf.calibration import cost_model
from moejax.plan.layout import GROUP_AXES, Layout, Topology
from moejax.resolve.speeds import presumed
from tests.support.close import are_same_bits
from tests.support.layers import MERGED, MESHES, layer_layout
from tests.support.random_plans import random_owners
from tests.support.resolved import make_layout, make_run


def test_master_params_move_between_all_devices_of_the_group():
    """Parameters keep every bit when they move to new owners, and when they are
    resharded by hidden width and back."""
    mesh, names = make_mesh(MESHES["data2_expert4"]), list(EXPERT_PARAMS)
    layout = layer_layout(MESHES["data2_expert4"], "owned", MERGED)
    mesh_layout = on_mesh(mesh, layout)
    rng, layer_l1 = np.random.default_rng(0), np.arange(3)[:, None]
    old_le, new_le = (random_owners(rng, 16, 3) for _ in range(2))
    logical = [
        rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
        for shape in ((3, 16, 4, 8), (3, 16, 4, 8), (3, 16, 8, 4))
    ]
    by_expert = sharding(mesh, None, MERGED)
    leaves = [leaf[layer_l1, old_le] for leaf in logical]
    leaves = jax.device_put(leaves, [by_expert] * 3)
    run_move = jax.jit(lambda *args: move(args[0], names, args[1], mesh_layout))
    for rounds in exchanges(old_le, new_le, 8):
        leaves = run_move(leaves, everywhere(rounds, mesh))
    assert are_same_bits(leaves, [leaf[layer_l1, new_le] for leaf in logical])
    wide = jax.jit(lambda x: reshard(x, names, "sharded", mesh_layout))(leaves)
    assert wide[0].sharding.shard_shape(wide[0].shape) == (3, 16, 4, 1)
    back = jax.jit(lambda x: reshard(x, names, "owned", mesh_layout))(wide)
    assert are_same_bits(wide, leaves)
    assert are_same_bits(back, leaves)
    assert all(leaf.sharding.is_equivalent_to(by_expert, 4) for leaf in back)


def test_a_group_is_of_all_devices_over_its_axes():
    cfg = Config(
        mesh=Topology(dc=2, data=2, expert=4),
        moe=Moe(num_experts=16),
        dispatch=Dispatch(group="data_expert", store="resident"),
    )
    run = make_run(cfg)
    layout = run.layout
    assert (cfg.group_size, layout.num_devices, layout.axes) == (8, 8, MERGED)
    assert (layout.experts_per_device, run.settings.max_slots_per_device) == (2, 6)
    alone = dataclasses.replace(cfg, dispatch=Dispatch())
    assert (alone.group_size, make_layout(alone).axes) == (4, ("expert",))


SIZES = {"d_model": 8, "d_expert": 16, "itemsize": 2, "micro_batches": 1,
         "other_flops_per_device": 0.0}  # fmt: skip


def test_merged_slots_are_whole_and_nothing_gathers_them():
    """The cost model sends whole experts. It uses the calibrated speed of the group if
    there is one, and that of the slower axis otherwise."""
    lines = {
        name: {"latency_sec": 0.0, "bytes_per_sec": speed, "r2": 1.0}
        for name, speed in (("data", 1e9), ("expert", 2e9), ("data_expert", 3e9))
    }

    def cost(group, data, expert, *names):
        mesh = {"dc": 1, "data": data, "expert": expert, "tensor": 1}
        to_all = {name: lines[name] for name in names}
        measured = dataclasses.replace(
            presumed(mesh, "cpu"),
            collectives={"all_to_all": to_all, "all_gather": {"data": lines["data"]}},
        )
        return cost_model(measured, **SIZES, group=GROUP_AXES[group])

    weights = 3 * 8 * 16
    alone = cost("expert", 2, 4, "data", "expert", "data_expert")
    assert alone.bytes_per_expert == weights * 2 / 2
    assert alone.gather_sec > 0
    merged = cost("data_expert", 2, 4, "data", "expert")
    assert merged.bytes_per_expert == weights * 2
    assert merged.bytes_per_move == weights * 12
    assert merged.gather_sec == 0
    assert (merged.bytes_per_sec, alone.bytes_per_sec) == (1e9, 2e9)
    assert cost("data_expert", 2, 4, *lines).bytes_per_sec == 3e9
    assert cost("data_expert", 8, 1, "data").bytes_per_sec == 1e9
    with pytest.raises(ValueError, match="no all_to_all over the 'data' axis"):
        cost("data_expert", 2, 4)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Config(mesh=Topology(data=4, expert=4), moe=Moe(num_experts=24),
             dispatch=Dispatch(group="data_expert")),
         ["Moe.num_experts=24", "group data x expert (16)", "16 or 32"]),
        (lambda: Layout.home(12, 8, 64, axes=MERGED),
         ["num_experts=12", "group data x expert (8)", "another Dispatch.group"]),
        (lambda: Layout(8, 8, 1, 8, transport="local", axes=MERGED),
         ["transport='local'", "group data x expert has 8 devices"]),
        (lambda: Layout(8, 8, 1, 8, axes=("expert", "data")),
         ["axes=('expert', 'data')", "('data', 'expert')"]),
    ],
)  # fmt: skip
def test_error_names_the_group_and_what_to_do(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)
