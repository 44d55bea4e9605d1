"""Experts that travel compressed in a train step: what their copies follow, what a dry
run counts, and copies that begin anew."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.moe.weights import domains, stores
from tests.support.run_main import TOY, corpus
from tests.support.steps import DELTA, TWO_DCS, E, L, home, make_case, run
from train.config import gin_reader
from train.dry_run import dry_run
from train.step.expert_params import take
from train.step.state import init_state, with_new_tracked


def compressed():
    """Return the step of two micro-batches with experts that travel compressed."""
    return make_case(
        "small",
        "float32",
        mesh=TWO_DCS,
        dispatch=DELTA,
        train={"accumulate_steps": 2},
        model={"remat": "none"},
    )


def make_state(case):
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


@pytest.mark.slow
def test_a_tracked_expert_follows_its_masters_by_few_entries():
    """Every device of a domain starts with copies that equal the master parameters. A
    step then changes only as many entries of a copy as the ratio allows, and each of
    them moves to the new master value. An update that is not finite changes neither."""
    case = compressed()
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

    state = jax.device_get(state)
    bad = state.params["norm"]["scale_d"] * np.nan
    state = state.replace(params=state.params | {"norm": {"scale_d": bad}})
    after, metrics = run(case, jax.device_put(state, case.shardings), home(case), 1)
    assert metrics.is_skipped
    assert np.array_equal(rows(after.params), rows(state.params))


def match_experts(tracked_lsx: np.ndarray, masters_lex: np.ndarray) -> np.ndarray:
    """Return the expert of each tracked copy, by comparing its weights."""
    same_se = (tracked_lsx[0, :, None] == masters_lex[0][None]).all(axis=-1)
    assert (same_se.sum(axis=1) == 1).all()
    return same_se.argmax(axis=1)


@pytest.mark.slow
def test_the_tracked_state_can_be_made_anew():
    case = compressed()
    state = make_state(case)
    lost = state.replace(tracked=jnp.zeros_like(state.tracked))
    again = with_new_tracked(lost, case.model.run)
    assert np.array_equal(whole(again.tracked), whole(state.tracked))


def test_a_dry_run_counts_the_copies(capsys):
    """A device holds copies of all experts of its domain of four devices."""
    params = (
        f"Data.corpus = '{corpus()}'",
        "Mesh.dc = 2",
        "Mesh.data = 1",
        "Dispatch.group = 'dc_expert'",
        "Dispatch.domain = (2, 2)",
    )
    plain, tracked = (
        dry_run(gin_reader.load([TOY], (*params, *more)), None)["memory"]
        for more in ((), ("Dispatch.compression = 50.0",))
    )
    cfg = gin_reader.load([TOY], params)
    size = 3 * cfg.model.d_model * cfg.moe.d_expert
    num_held = 4 * cfg.moe.num_experts // 8
    copies = cfg.model.num_moe_layers * num_held * size * 4
    assert tracked["slots"] - plain["slots"] == copies
    assert "slots" in capsys.readouterr().out
