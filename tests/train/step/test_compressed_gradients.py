"""Compressed gradients in the trainer's step: the gradients that arrive, the residuals
that stay, the bytes that are sent, and the residuals after skipped updates and
restarts."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
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
from tests.support.communication_steps import (
    TWO_DCS,
    home_plan,
    make_context,
    whole,
    wire_case,
)
from tests.support.run_main import TOY, checkpoint_record, corpus, metric_lines, run
from tests.support.steps import SMALL, E, L, StepCase, case_maker
from tests.support.steps import run as run_step
from tools.compiled.census import HLO
from train.checkpoint.checkpoints import Checkpointer
from train.config import gin_reader
from train.dry_run import dry_run
from train.job import prepare
from train.loop import restore
from train.step.compiled import home_placement
from train.step.expert_params import take
from train.step.state import init_state
from train.step.step import StepContext

RATIO, MICRO_BATCHES, MEMBERS = 8.0, 2, 4
SIZE = 3 * SMALL.model.d_model * SMALL.moe.d_expert


@functools.cache
def delta(
    ratio: float | None, mesh: Topology = TWO_DCS, remat: str = "none"
) -> StepCase:
    """Return the case 'delta' with compressed gradients, in two micro-batches."""
    cfg = (model := make_context("delta", "float32")).cfg
    parts = {
        "dispatch": dataclasses.replace(cfg.dispatch, gradient_compression=ratio),
        "train": dataclasses.replace(cfg.train, accumulate_steps=MICRO_BATCHES),
        "model": dataclasses.replace(cfg.model, remat=remat),
    }
    return case_maker(change_config(model, mesh=mesh, **parts))


def change_config(model: StepContext, /, **parts) -> StepContext:
    cfg = dataclasses.replace(model.cfg, **parts)
    return model._replace(run=resolve(cfg, make_mesh(cfg.mesh)))


def make_state(case: StepCase):
    return init_state(case.model.run, case.model.optimizer)


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


@pytest.mark.long
@pytest.mark.slow
def test_what_arrives_and_what_is_kept_is_the_gradient():
    """In each step, the arrived gradient plus the new residual equals the exact
    gradient from the same state plus the old residual."""
    case, exact = delta(RATIO), delta(None)
    state, plan = make_state(case), home_plan(case)
    for step in range(3):
        before_lex = residual_rows(case, state)
        alike = jax.device_get(state.replace(gradient_residual=None))
        alike = jax.device_put(alike, exact.shardings)
        expected, _ = run_step(exact, alike, plan, step)
        state, metrics = run_step(case, state, plan, step)
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
    plan = home_plan(case)
    expected, _ = run_step(exact, make_state(exact), plan, 0)
    state, _ = run_step(case, make_state(case), plan, 0)
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
    plan = home_plan(case)
    state, _ = run_step(case, make_state(case), plan, 0)
    state = jax.device_get(state)
    if where == "params":
        bad = state.params["norm"]["scale_d"] * np.nan
        state = state.replace(params=state.params | {"norm": {"scale_d": bad}})
    else:
        residual = state.gradient_residual.copy()
        residual[0, 1, 5] = np.inf
        state = state.replace(gradient_residual=residual)
    after, metrics = run_step(case, jax.device_put(state, case.shardings), plan, 1)
    assert metrics.is_skipped
    assert np.array_equal(whole(after.gradient_residual), state.gradient_residual)
    same = jax.tree.map(
        lambda x, y: np.array_equal(x, y, equal_nan=True),
        jax.device_get(after.params),
        state.params,
    )
    assert all(jax.tree.leaves(same))


def expert_scatters(lines: list[str]) -> list[str]:
    """Return the reduce-scatters of experts' gradients among collectives."""
    scatters = [line for line in lines if "reduce-scatter(" in line]
    return [x for x in scatters if "/slots/" in x or "gather_experts" in x]


@pytest.mark.slow
def test_entries_alone_travel_and_the_prediction_says_so():
    """Each layer has one all_to_all of bytes in place of the reduce-scatter of full
    gradients. It runs once a step for any number of micro-batches."""
    case, exact = delta(RATIO), wire_case("delta", "float32")
    lines, before = (
        [line for line in step.as_text().splitlines() if HLO.search(line)]
        for step in (case.step, exact.step)
    )
    assert expert_scatters(before)
    assert not expert_scatters(lines)
    of_layers = [x for x in lines if "all-to-all(" in x and "u8[" in x]
    assert len(of_layers) == case.model.cfg.model.num_moe_layers
    dims = re.findall(r"u8\[([\d,]*)\]", of_layers[0].split("all-to-all(")[0])
    sent = sum(int(np.prod([int(n) for n in one.split(",")])) for one in dims)
    k, _ = domains.entries(SIZE, np.float32, RATIO)
    assert sent == MEMBERS * (2 * k + SCALE_BYTES)
    calibration = case.model.run.calibration
    stream = layer_traffic(case.model.cfg, calibration)
    result = predict(stream, (2, 2), calibration)
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
    model = make_context("delta", "float32")
    fields = {"domain": (2, 1), "gradient_compression": 1.0, "compression": "none"}
    dispatch = dataclasses.replace(model.cfg.dispatch, **fields)
    model = change_config(model, dispatch=dispatch)
    monkeypatch.setattr(gradient_compression, "entries", lambda size, *_: (size, 1))
    monkeypatch.setattr(gradient_compression, "VALUE_DTYPE", "float32")
    state = init_state(model.run, model.optimizer)
    master_params, _ = take(state.params)
    placement, mesh_layout = home_placement(model.run), model.run.mesh_layout

    @jax.jit
    def both(master_params, seed):
        def slots(master_params):
            def make(master_params, placement):
                of_run = mesh_layout, jnp.float32, "float32"
                return stores.slots(master_params, placement, *of_run)

            return stores.slots_of_layers(make, model.mesh, master_params, placement)

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


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_was_stopped_is_the_same_run(tmp_path):
    params = (
        *TWO_DCS_GIN,
        "Dispatch.domain = (2, 2)",
        *BOTH,
        "Train.eval_every_steps = 4",
    )
    dirs = tmp_path / "whole", tmp_path / "parts"
    for run_dir, steps in zip((dirs[0], dirs[1], dirs[1]), (8, 4, 8)):
        ended = run(run_dir, *params, f"Train.num_steps = {steps}")
        assert ended.code == 0, ended.err
    assert metric_lines(dirs[0]) == metric_lines(dirs[1])
    arrays = [checkpoint_record(run_dir, 8)["arrays"] for run_dir in dirs]
    assert "gradient_residual" in arrays[0]
    assert arrays[0] == arrays[1]
