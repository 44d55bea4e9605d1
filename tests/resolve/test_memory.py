"""Laws of the predicted memory of a step. tests/tools/compiled/test_goldens.py compares
it with compiled steps."""

import dataclasses

import pytest
from jax.sharding import AbstractMesh

from moejax.axes import AUTO, AXES
from moejax.config import Config, Data, Dispatch, Moe
from moejax.plan.layout import Topology, max_aligned_rows
from moejax.resolve.memory import KINDS, state_bytes, step_memory
from moejax.resolve.resolved import resolve
from tests.support.resolved import aligned_slots

CFG = Config(mesh=Topology(expert=2))
HELD = {"params": 1000, "trained": 1000, "moments": 2000}


def predict(cfg: Config, held: dict[str, int] = HELD) -> dict[str, int]:
    mesh = AbstractMesh(cfg.mesh.sizes, AXES, axis_types=AUTO * 4)
    run = resolve(cfg, mesh)
    return step_memory(cfg, run.layout, held, run.kernels["attention"].value)


def with_model(**fields) -> Config:
    return dataclasses.replace(CFG, model=dataclasses.replace(CFG.model, **fields))


def test_what_rests_is_taken_as_it_is():
    memory = predict(CFG)
    assert tuple(memory) == KINDS
    assert (memory["masters"], memory["moments"]) == (1000, 2000)
    assert memory["gradients"] > 1000
    more = predict(CFG, HELD | {"tracked": 7})
    assert more["slots"] - memory["slots"] == 7


@pytest.mark.parametrize(
    ("less", "more"),
    [("offload", "full"), ("full", "dispatch"), ("dispatch", "none")],
)
def test_a_remat_policy_that_keeps_more_needs_more(less, more):
    needs = [sum(predict(with_model(remat=remat)).values()) for remat in (less, more)]
    assert needs[0] < needs[1]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_only_the_definition_of_attention_needs_memory_for_pairs_of_tokens(remat):
    """Twice the tokens need twice the memory; 'reference' needs four times as much for
    its scores."""

    def activations(attention: str, seq_len: int) -> int:
        cfg = dataclasses.replace(CFG, data=Data(seq_len=seq_len))
        model = dataclasses.replace(CFG.model, attention=attention, remat=remat)
        return predict(dataclasses.replace(cfg, model=model))["activations"]

    for attention in ("cudnn", "blocked"):
        assert activations(attention, 8192) == 2 * activations(attention, 4096)
    assert activations("reference", 8192) > 3 * activations("reference", 4096)


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_the_workspace_of_cudnn_is_that_of_one_row(accumulate_steps):
    """A row of 32768 tokens has 32 places for documents in 4 GiB, where the gradient of
    its queries is 32768 x 16 x 64 float32. 'blocked' has no workspace, and copies
    queries, keys, values and the output's gradient of a micro-batch in bfloat16."""
    model = dataclasses.replace(CFG.model, num_heads=16, num_kv_heads=16, head_dim=64)
    train = dataclasses.replace(CFG.train, accumulate_steps=accumulate_steps)
    data = Data(seq_len=32768)
    needs = {
        name: predict(
            dataclasses.replace(
                CFG,
                model=dataclasses.replace(model, attention=name),
                train=train,
                data=data,
            )
        )
        for name in ("cudnn", "blocked")
    }
    more = {kind: needs["cudnn"][kind] - needs["blocked"][kind] for kind in KINDS}
    places, rows = 32, train.batch_size // accumulate_steps // 2
    expected = 32768 * (places * 16 * 64 * 4 - rows * (16 + 16) * (64 + 64) * 2)
    assert more == dict.fromkeys(KINDS, 0) | {"activations": expected}


def test_kept_activations_grow_with_layers_and_bfloat16_halves_what_travels():
    two, four = (predict(with_model(remat="full", num_layers=num)) for num in (2, 4))
    assert {kind for kind in KINDS if four[kind] > two[kind]} == {"activations"}
    wide = predict(with_model(compute_dtype="float32"))
    narrow = predict(with_model(compute_dtype="bfloat16"))
    assert narrow["exchange"] == wide["exchange"] / 2


def test_zero_rows_between_slots_take_memory():
    """A device receives 1.5 times its even share of rows, from two devices."""
    tokens = CFG.train.batch_size // 2 * CFG.data.seq_len
    received = 2 * int(1.5 * tokens * CFG.moe.top_k / 2)
    expected = max_aligned_rows(received, CFG.moe.num_experts // 2, 128) / received
    with aligned_slots(128):
        aligned = predict(CFG)
    assert aligned["exchange"] == expected * predict(CFG)["exchange"]


def test_shared_experts_take_weights_and_hidden_states():
    shared = dataclasses.replace(CFG, moe=Moe(num_shared_experts=2))
    for kind in ("slots", "gradients", "activations"):
        assert predict(shared)[kind] > predict(CFG)[kind]


def test_resident_slots_are_there_for_all_layers_with_their_gradients():
    """The sums of their gradients take the place of those of the parameters."""
    more = Dispatch(store="resident", slots_per_device=CFG.moe.num_experts)
    own, all_layers = predict(CFG), predict(dataclasses.replace(CFG, dispatch=more))
    for kind in ("slots", "gradients"):
        assert all_layers[kind] > own[kind] + CFG.model.num_layers


def test_slots_that_are_gathered_once_are_whole_for_all_layers():
    """Beside them are float32 sums of their gradients, in place of those of the
    parameters, of which a device has a part."""
    cfg = dataclasses.replace(CFG, mesh=Topology(data=4, expert=2))
    once = dataclasses.replace(cfg, dispatch=Dispatch(gather="step"))
    held = state_bytes(cfg)
    layer, step = predict(cfg, held), predict(once, held)
    more = {kind: step[kind] - layer[kind] for kind in KINDS}
    model, moe = CFG.model, CFG.moe
    weights = model.num_layers * moe.num_experts // 2 * 3 * model.d_model * moe.d_expert
    own = weights // 4
    expected = {"slots": 2 * weights, "gradients": 4 * (weights - own)}
    assert more == dict.fromkeys(KINDS, 0) | expected
