"""The cost model of expert groups over the merged axes data and expert.
test_equals_reference.py compares layers of such groups with the reference, and
weights/test_migrate.py moves their parameters."""

import dataclasses

import pytest

from moejax.perf.cost_model import cost_model
from moejax.plan.groups import GROUP_AXES
from moejax.resolve.speeds import presumed

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
