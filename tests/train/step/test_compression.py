"""Experts and gradients that travel compressed in a train step: what arrives, what
stays, the bytes that are sent, and the state after skipped updates and restarts."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moejax.axes import make_mesh
from moejax.moe.weights import domains, gradient_compression, stores
from moejax.moe.weights.gradient_compression import SCALE_BYTES
from moejax.perf.choose_domain import predict
from moejax.plan.layout import Topology
from moejax.resolve.communication import layer_traffic
from moejax.resolve.resolved import resolve
from tests.support.calibrations import ideal, stream
from tests.support.close import assert_close
from tests.support.run_main import TOY, corpus
from tests.support.steps import (
    DELTA,
    SMALL,
    TWO_DCS,
    E,
    L,
    StepCase,
    configure,
    home,
    make_case,
    run,
)
from train.checkpoint.checkpoints import Checkpointer
from train.checkpoint.identity import has_same_sharding
from train.config import gin_reader
from train.dry_run import dry_run
from train.job import prepare
from train.loop import restore
from train.step.compiled import home_placement
from train.step.expert_params import take
from train.step.state import init_state, with_new_tracked

RATIO, MICRO_BATCHES, MEMBERS = 8.0, 2, 4
SIZE = 3 * SMALL.model.d_model * SMALL.moe.d_expert


def delta(
    ratio: float | None, mesh: Topology = TWO_DCS, remat: str = "none"
) -> StepCase:
    """Return the step of two micro-batches with experts that travel compressed, and
    gradients too unless `ratio` is None."""
    return make_case(
        "small",
        "float32",
        mesh=mesh,
        dispatch=DELTA | {"gradient_compression": ratio},
        train={"accumulate_steps": MICRO_BATCHES},
        model={"remat": remat},
    )


def make_state(case: StepCase):
    return init_state(case.model.run, case.model.optimizer)


def whole(array) -> np.ndarray:
    """Return a distributed array as one NumPy array."""
    return np.asarray(jax.device_get(array))


def rows(tree) -> np.ndarray:
    """Return the flattened experts of all layers, [l, e, x]."""
    master_params, _ = take(jax.device_get(tree))
    gate, up, down = (master_params[n] for n in stores.EXPERT_PARAMS)
    into = np.stack([gate, up], axis=3)
    return np.concatenate([into.reshape(L, E, -1), down.reshape(L, E, -1)], axis=2)


def residual_rows(case: StepCase, state) -> np.ndarray:
    """Return the sum of all members' residuals of each expert's gradient, [l, e, x].

    Each device has its own rows, member by member.
    """
    residual_lwsx = whole(state.gradient_residual).reshape(L, E, MEMBERS, SIZE)
    sum_lex = np.zeros((L, E, SIZE), np.float32)
    for members in case.model.layout.domain.members():
        for device in members:
            sum_lex[:, members] += residual_lwsx[:, device]
            place = members.index(device)
            # A device's own gradients are not compressed.
            assert not residual_lwsx[:, device, place].any()
    return sum_lex


@pytest.mark.slow
def test_a_tracked_expert_follows_its_masters_by_few_entries():
    """Every device of a domain starts with copies that equal the master parameters. A
    step then changes only as many entries of a copy as the ratio allows, and each of
    them moves to the new master value."""
    case = delta(RATIO)
    state = make_state(case)
    before, master_params = whole(state.tracked), rows(state.params)
    # A domain is four devices with two expert indices; slots are by (dc, expert, own).
    assert np.array_equal(np.sort(before, axis=1), np.sort(master_params, axis=1))
    state, _ = run(case, state, home(case))
    after, now_lex = whole(state.tracked), rows(state.params)
    k, _ = domains.entries(before.shape[2], np.float32, 8.0)
    is_moved = after != before
    assert (is_moved.sum(axis=2) <= k).all()
    assert is_moved.sum(axis=2).mean() > k / 2
    now = now_lex[:, match_experts(before, master_params)]
    off = np.abs(after - now)[is_moved]
    # An entry is rounded to two bits after its leading bit.
    assert (off <= np.abs(before - now)[is_moved] / 8 + 1e-7).all()


def match_experts(tracked_lsx: np.ndarray, masters_lex: np.ndarray) -> np.ndarray:
    """Return the expert of each tracked copy, by comparing its weights."""
    same_se = (tracked_lsx[0, :, None] == masters_lex[0][None]).all(axis=-1)
    assert (same_se.sum(axis=1) == 1).all()
    return same_se.argmax(axis=1)


@pytest.mark.slow
def test_tracked_state_starts_over_under_another_sharding():
    """The tracked state is made as at the start of a run, if the sharding differs."""
    case = delta(RATIO)
    state, model = make_state(case), case.model
    lost = state.replace(tracked=jnp.zeros_like(state.tracked))
    again = with_new_tracked(lost, model.run)
    assert np.array_equal(whole(again.tracked), whole(state.tracked))
    meta = {"config": json.loads(json.dumps(model.cfg.to_dict()))}
    assert has_same_sharding(meta, model.cfg)
    other = dataclasses.replace(model.cfg.dispatch, domain=(2, 1))
    assert not has_same_sharding(meta, dataclasses.replace(model.cfg, dispatch=other))


@pytest.mark.long
@pytest.mark.slow
def test_what_arrives_and_what_is_kept_is_the_gradient():
    """In each step, the arrived gradient plus the new residual equals the exact
    gradient from the same state plus the old residual."""
    case, exact = delta(RATIO), delta(None)
    state, plan = make_state(case), home(case)
    for step in range(3):
        before_lex = residual_rows(case, state)
        alike = jax.device_get(state.replace(gradient_residual=None))
        alike = jax.device_put(alike, exact.shardings)
        expected, _ = run(exact, alike, plan, step)
        state, metrics = run(case, state, plan, step)
        assert not metrics.is_skipped
        arrived_lex, residual_lex = rows(state.opt_state[0]), residual_rows(case, state)
        whole_lex = rows(expected.opt_state[0])
        assert_close(arrived_lex + residual_lex, whole_lex + before_lex)
        assert np.abs(residual_lex).max() > 0.01 * np.abs(whole_lex).max() > 0


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "remat"),
    [
        (Topology(dc=2, data=2, expert=2), "full"),
        (Topology(dc=2, expert=2, tensor=2), "none"),
    ],
)
def test_the_same_where_experts_are_split_otherwise(mesh, remat):
    """Hidden widths are sharded over data or tensor. The test compares sums over all
    weights of a layer, because residuals are ordered by shard."""
    case, exact = (delta(ratio, mesh, remat) for ratio in (RATIO, None))
    plan = home(case)
    expected, _ = run(exact, make_state(exact), plan, 0)
    state, _ = run(case, make_state(case), plan, 0)
    arrived_lex, whole_lex = rows(state.opt_state[0]), rows(expected.opt_state[0])
    residual_lsx = whole(state.gradient_residual)
    assert np.abs(residual_lsx).max() > 0.01 * np.abs(whole_lex).max() > 0
    sums = [
        array.astype(np.float64).sum((1, 2)) for array in (arrived_lex, residual_lsx)
    ]
    assert_close(sum(sums), whole_lex.astype(np.float64).sum((1, 2)), dtype=np.float32)
    assert np.abs(sums[1]).min() > 1e-4 * np.abs(sum(sums)).max()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["params", "kept"])
def test_a_skipped_update_keeps_what_was_kept(where):
    """Residuals and parameters stay the same bits, even if only residuals are not
    finite."""
    case = delta(RATIO)
    plan = home(case)
    state, _ = run(case, make_state(case), plan, 0)
    state = jax.device_get(state)
    if where == "params":
        bad = state.params["norm"]["scale_d"] * np.nan
        state = state.replace(params=state.params | {"norm": {"scale_d": bad}})
    else:
        residual = state.gradient_residual.copy()
        residual[0, 1, 5] = np.inf
        state = state.replace(gradient_residual=residual)
    after, metrics = run(case, jax.device_put(state, case.shardings), plan, 1)
    assert metrics.is_skipped
    assert np.array_equal(whole(after.gradient_residual), state.gradient_residual)
    same = jax.tree.map(
        lambda x, y: np.array_equal(x, y, equal_nan=True),
        jax.device_get(after.params),
        state.params,
    )
    assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_entries_alone_travel_and_the_prediction_says_so():
    """Each layer has one all_to_all of bytes, and no reduce-scatter of experts'
    gradients. It runs once a step for any number of micro-batches."""
    case = delta(RATIO)
    lines = case.step.as_text().splitlines()
    scatters = [line for line in lines if "reduce-scatter(" in line]
    assert not [x for x in scatters if "/slots/" in x or "gather_experts" in x]
    of_layers = [x for x in lines if "all-to-all(" in x and "u8[" in x]
    assert len(of_layers) == case.model.cfg.model.num_moe_layers
    dims = re.findall(r"u8\[([\d,]*)\]", of_layers[0].split("all-to-all(")[0])
    sent = sum(int(np.prod([int(n) for n in one.split(",")])) for one in dims)
    k, _ = domains.entries(SIZE, np.float32, RATIO)
    assert sent == MEMBERS * (2 * k + SCALE_BYTES)
    calibration = case.model.run.calibration
    result = predict(layer_traffic(case.model.cfg, calibration), (2, 2), calibration)
    leaving = MICRO_BATCHES * result.total_bytes("all_to_all dc_expert gradients")
    assert leaving == pytest.approx(sent * (MEMBERS - 1) / MEMBERS)
    assert not result.total_bytes("reduce_scatter")


def test_what_moves_once_a_step_counts_for_each_micro_batch_by_its_share():
    """The cases are compressed gradients of experts, and compressed experts."""
    here = stream(1e6, 1e6, is_training=True, num_micro_batches=4)
    for out, back in ((1.0, 50.0), (50.0, None)):
        ratios = {"compression": out, "gradient_compression": back}
        result = predict(dataclasses.replace(here, **ratios), (8,), ideal(dc=1e8))
        sent = 7e6 / out / 4, *((7e6 / back / 4, 0) if back else (0, 7e6))
        kinds = "all_gather", "all_to_all", "reduce_scatter"
        assert [result.total_bytes(kind) for kind in kinds] == pytest.approx(sent)


@pytest.mark.slow
def test_all_entries_are_whole_gradients_bit_for_bit(monkeypatch):
    """In float32, between pairs, they equal the transpose of the gather."""
    fields = {"domain": (2, 1), "gradient_compression": 1.0, "compression": "none"}
    cfg = configure(mesh=TWO_DCS, dispatch=DELTA | fields)
    resolved = resolve(cfg, make_mesh(cfg.mesh))
    monkeypatch.setattr(gradient_compression, "entries", lambda size, *_: (size, 1))
    monkeypatch.setattr(gradient_compression, "VALUE_DTYPE", "float32")
    state = init_state(resolved, optax.identity())
    master_params, _ = take(state.params)
    placement, mesh_layout = home_placement(resolved), resolved.mesh_layout

    @jax.jit
    def both(master_params, seed):
        def slots(master_params):
            def make(master_params, placement):
                of_run = mesh_layout, jnp.float32, "float32"
                return stores.slots(master_params, placement, *of_run)

            return stores.slots_of_layers(make, resolved.mesh, master_params, placement)

        slots_tree, pull = jax.vjp(slots, master_params)
        keys = jax.random.split(jax.random.key(seed), len(slots_tree))
        grads = {
            name: jax.random.normal(key, leaf.shape)
            for key, (name, leaf) in zip(keys, slots_tree.items())
        }
        residual = state.gradient_residual
        return pull(grads)[0], stores.scatter_gradients(
            grads, residual, mesh_layout, jnp.float32
        )

    expected, (result, residual) = jax.device_get(both(master_params, 0))
    assert expected.keys() == result.keys()
    assert all(np.array_equal(result[n], expected[n]) for n in result)
    assert not residual.any()


TWO_DCS_GIN = ("Mesh.dc = 2", "Mesh.data = 1", "Dispatch.group = 'dc_expert'")
BOTH = ("Dispatch.compression = 'delta'", "Dispatch.gradient_compression = 8")


def make_job(domain: str, *params: str):
    params = (
        f"Data.corpus = '{corpus()}'",
        *TWO_DCS_GIN,
        f"Dispatch.domain = {domain}",
        *params,
    )
    return prepare(gin_reader.load([TOY], params))


@pytest.mark.long
@pytest.mark.slow
def test_a_run_goes_on_with_what_was_kept(tmp_path):
    """Residuals are restored bit for bit under the same sharding. Otherwise they start
    from zero, and a line says so. A run may start or stop compressing gradients."""
    job = make_job("(2, 2)", *BOTH)
    state = init_state(job.model.run, job.model.optimizer)
    sharding = state.gradient_residual.sharding
    residual = np.random.default_rng(0).normal(size=state.gradient_residual.shape)
    residual = jax.device_put(residual.astype(np.float32), sharding)
    for name, one in (("kept", residual), ("off", None)):
        writer = Checkpointer(tmp_path / name, job.cfg.checkpoint)
        cfg = job.cfg
        if one is None:
            dispatch = dataclasses.replace(cfg.dispatch, gradient_compression=None)
            cfg = dataclasses.replace(cfg, dispatch=dispatch)
        meta = job.meta | {"config": cfg.to_dict()}
        writer.save(3, state.replace(gradient_residual=one), meta)
        writer.close()

    def restored(name, job):
        messages, reader = [], Checkpointer(tmp_path / name, job.cfg.checkpoint)
        state, _ = restore(job, reader, messages.append)
        reader.close()
        return state, "\n".join(messages)

    same, messages = restored("kept", job)
    assert np.array_equal(whole(same.gradient_residual), whole(residual))
    assert same.gradient_residual.sharding == sharding
    assert "no gradient residuals" not in messages
    pairs, messages = restored("kept", make_job("(2, 1)", *BOTH))
    num_rows = job.cfg.moe.num_experts * 2
    assert pairs.gradient_residual.shape == (
        residual.shape[0],
        num_rows,
        residual.shape[2],
    )
    assert not whole(pairs.gradient_residual).any()
    assert "no gradient residuals that fit" in messages
    begins, messages = restored("off", job)
    assert not whole(begins.gradient_residual).any()
    assert begins.gradient_residual.shape == residual.shape
    assert "no gradient residuals that fit" in messages
    ends, messages = restored("kept", make_job("(2, 2)", BOTH[0]))
    assert ends.gradient_residual is None
    assert "no gradient residuals" not in messages


def test_a_dry_run_counts_what_is_kept(capsys):
    """A device holds float32 residuals of all experts of its domain, and during a step
    the slots of all layers and their gradients."""
    job = make_job("(2, 2)", *BOTH)
    memory = dry_run(job.cfg, None)["memory"]
    layers, size = job.cfg.model.num_moe_layers, 3 * 32 * 32
    residual = layers * MEMBERS * size * 4
    one_layer = residual // layers
    beside = memory["gradients"] - memory["masters"] - 2 * residual
    assert one_layer <= beside < residual
    # The estimates of compressed experts are as many.
    assert 2 * residual + one_layer <= memory["slots"] < 3 * residual
    assert "gradients" in capsys.readouterr().out
