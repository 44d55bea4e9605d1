"""What the predicted memory of a step follows. How near it is to compiled steps is
tested in tests/tools/compiled/test_goldens.py."""

import dataclasses

import pytest
from jax.sharding import AbstractMesh

from moejax.axes import AUTO, AXES
from moejax.config import Config, Dispatch, Moe
from moejax.plan.layout import Topology
from moejax.resolve.memory import KINDS, step_memory
from moejax.resolve.resolved import resolve

CFG = Config(mesh=Topology(expert=2))
HELD = {"params": 1000, "moments": 2000}


def predict(cfg: Config, held: dict[str, int] = HELD) -> dict[str, int]:
    mesh = AbstractMesh(cfg.mesh.sizes, AXES, axis_types=AUTO * 4)
    return step_memory(cfg, resolve(cfg, mesh).layout, held)


def with_model(**fields) -> Config:
    return dataclasses.replace(CFG, model=dataclasses.replace(CFG.model, **fields))


def test_what_rests_is_taken_as_it_is():
    memory = predict(CFG)
    assert tuple(memory) == KINDS
    assert (memory["masters"], memory["moments"]) == (1000, 2000)
    assert memory["gradients"] > 1000
    more = predict(CFG, HELD | {"tracked": 7, "gradient_residual": 5})
    assert more["slots"] - memory["slots"] == 7
    assert more["gradients"] - memory["gradients"] == 5


@pytest.mark.parametrize(
    ("less", "more"),
    [("offload", "full"), ("full", "dispatch"), ("dispatch", "none")],
)
def test_a_remat_policy_that_keeps_more_needs_more(less, more):
    needs = [sum(predict(with_model(remat=remat)).values()) for remat in (less, more)]
    assert needs[0] < needs[1]


def test_kept_activations_grow_with_layers_and_others_do_not():
    two, four = (predict(with_model(remat="full", num_layers=num)) for num in (2, 4))
    grown = {kind for kind in KINDS if four[kind] > two[kind]}
    assert grown == {"activations"}


def test_bfloat16_halves_what_travels():
    wide, narrow = (
        predict(with_model(compute_dtype=dtype)) for dtype in ("float32", "bfloat16")
    )
    assert narrow["exchange"] == wide["exchange"] / 2


def test_shared_experts_take_weights_and_hidden_states():
    shared = dataclasses.replace(CFG, moe=Moe(num_shared_experts=2))
    for kind in ("slots", "gradients", "activations"):
        assert predict(shared)[kind] > predict(CFG)[kind]


def test_resident_slots_are_there_for_all_layers_with_their_gradients():
    resident = dataclasses.replace(CFG, dispatch=Dispatch(store="resident"))
    own, all_layers = predict(CFG), predict(resident)
    for kind in ("slots", "gradients"):
        assert all_layers[kind] > own[kind] + CFG.model.num_layers
