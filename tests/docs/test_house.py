"""Run the worked examples of docs/extend.md and moejax/moe/README.md as they are
written, and check the table of settings in docs/balance.md."""

import dataclasses
import re
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.axes import EXPERT, make_mesh
from moejax.balance import adoptions, controller
from moejax.balance.candidates import ratio_by_layer
from moejax.balance.controller import Settings
from moejax.balance.policies import POLICIES, Policy
from moejax.config import Balance
from moejax.moe.exchange.dispatch import Window, make_receipt
from moejax.moe.exchange.manifest import manifest, num_dropped
from moejax.moe.exchange.rounds import exchange, num_rounds
from moejax.moe.mesh_roles import on_mesh
from moejax.moe.types import Placement
from moejax.perf.cost_model import NOTES
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Store, Topology
from tests.support.close import assert_close

L, W, E = 2, 8, 16
ROWS = 4096
"""Number of rows that one source device has in a step."""
LAYOUT = Layout(
    E, W, 3, 64, "ragged", store="resident", offers_per_device=2, copies_per_device=1
)
HOME = ExpertPlan.home_in(LAYOUT, L)


def zipf(seed: int | None = None) -> np.ndarray:
    """Return loads ~ 1 / (i + 1) of expert i, in random order if a seed is given."""
    load_e = 1 / np.arange(1, E + 1)
    if seed is not None:
        load_e = np.random.default_rng(seed).permutation(load_e)
    return np.tile(ROWS * load_e / load_e.sum(), (L, W, 1))


def worst(load_lwe, plan, layout=LAYOUT) -> float:
    """Return the largest max/mean of the devices over all layers."""
    return ratio_by_layer(load_lwe, plan, layout).max()


@pytest.fixture
def page(repo) -> str:
    """The text of docs/extend.md."""
    return (repo / "docs" / "extend.md").read_text()


@pytest.fixture
def hottest(page, monkeypatch) -> Policy:
    """The policy of the page, made from its file and its entry in POLICIES."""
    file, entry = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    module = types.ModuleType("hottest")
    exec(compile(file, "extend.md", "exec"), module.__dict__)
    entries = eval(f"{{{entry}}}", {"Policy": Policy, "hottest": module})
    for name, policy in entries.items():
        monkeypatch.setitem(POLICIES, name, policy)
    return POLICIES["hottest"]


def test_the_policy_of_the_page_evens_a_zipf_load(hottest, page):
    plan = hottest.plan(zipf(), LAYOUT, NOTES, HOME).validate(LAYOUT)
    before, after = worst(zipf(), HOME), worst(zipf(), plan)
    assert f"{before:.2f} at home and {after:.2f} with `hottest`" in page
    assert after < 0.5 * before
    for (
        row_p
    ) in plan.slot_to_expert_lp:  # expert 0 is the hottest, device 7 the coolest
        assert row_p.reshape(W, -1)[-1].tolist() == [14, 15, 0]


@pytest.mark.parametrize("offers", [0, 1, 2])
@pytest.mark.parametrize(("slots", "copies"), [(2, 0), (3, 1), (4, 1), (4, 2)])
def test_the_policy_of_the_page_keeps_budgets(hottest, slots, copies, offers):
    layout = Layout(E, W, slots, 64, "ragged", store="resident",
                    offers_per_device=offers, copies_per_device=copies)  # fmt: skip
    home = ExpertPlan.home_in(layout, L)
    for seed in range(5):
        plan = hottest.plan(zipf(seed), layout, NOTES, home).validate(layout)
        assert worst(zipf(seed), plan, layout) <= worst(zipf(seed), home, layout)
        assert (plan == home) == (offers == 0 or copies == 0)


def test_the_controller_adopts_the_policy_of_the_page(hottest):
    settings = Settings(
        policy="hottest", every_steps=5, lag_steps=3, act_above=1.3, rest_below=1.1,
        margin=0.02, cooldown_steps=20, horizon_steps=1000, half_life_steps=10.0,
        max_slots_per_device=3,
    )  # fmt: skip
    state = controller.init(settings, LAYOUT, HOME, L)
    load_lwe, decisions = np.round(zipf()).astype(int), []
    for step in range(20):
        if adoptions.is_due(state, step):
            state = controller.adopt(state)
        pair_l = np.zeros(L, int)
        state = controller.observe(settings, state, step, load_lwe, pair_l)
        state, decision = controller.decide(settings, NOTES, state, step)
        decisions += [decision] if decision else []
    assert [d.kind for d in decisions if d.adopt_step < 20] == ["swap"]
    assert decisions[0].policy == "hottest"
    assert state.plan == hottest.plan(load_lwe, LAYOUT, NOTES, HOME)
    assert worst(load_lwe, state.plan) < 0.5 * worst(load_lwe, HOME)


def test_the_page_of_settings_has_all_of_them_with_their_defaults(repo):
    page = (repo / "docs" / "balance.md").read_text()
    for field in dataclasses.fields(Balance):
        assert f"| `{field.name}` | `{field.default!r}` |" in page
    for name in POLICIES:
        assert f"\n| `{name}` | " in page
    for name in typing.get_args(Store):
        assert f"\n| `{name}` | " in page


def numbers(text: str) -> list[int]:
    """Return all integers in a text."""
    return [int(n) for n in re.findall(r"-?\d+", text)]


@pytest.fixture
def example(repo) -> str:
    """The worked example of moejax/moe/README.md."""
    text = (repo / "moejax" / "moe" / "README.md").read_text()
    return text[text.index("## Worked example") : text.index("## Further reading")]


def inputs(example: str):
    """Return slots, tokens and choices of both devices, from the example's tables."""
    slots = re.search(r"expert  (.*)", example)[1].replace("-", "-1")
    cells = [r.split("|")[2:-1] for r in example.splitlines() if r.startswith("| ")]
    _, *rows = cells
    x_n = np.array([float(c) for row in rows[::2] for c in row], np.float32)
    expert_nk = np.array([numbers(c) for row in rows[1::2] for c in row], np.int32)
    return np.array(numbers(slots), np.int32), x_n, expert_nk


TIMES_E = np.float32([1, 10, 100, 1000])
GATES = np.float32([0.75, 0.25])


def on_two_devices(example: str, mode: str):
    """Return the example's placement, and for both devices: outputs, send positions in
    round 0, counts, assignments, drops and rounds."""
    row_p, x_n, expert_nk = inputs(example)
    layout = Layout(4, 2, 3, 4, exchange=mode, store="resident", offers_per_device=1,
                    copies_per_device=1)  # fmt: skip
    plan = ExpertPlan(row_p[None], 4).validate(layout)
    placement = jax.tree.map(jnp.asarray, Placement.from_plan(plan, layout).layer(0))

    mesh, split = make_mesh(Topology(expert=2), jax.devices()[:2]), P(EXPERT)
    mesh_layout = on_mesh(mesh, layout)

    def body(x_n1, gate_nk, expert_nk):
        sent, _ = manifest(expert_nk, placement, mesh_layout)

        def experts(x_m1, rows_s, weights):
            end_s = jnp.cumsum(rows_s)
            slot_m = jnp.sum(jnp.arange(len(x_m1))[:, None] >= end_s, axis=1)
            return x_m1 * weights["times_s"][slot_m % layout.slots_per_device, None]

        times_ws = jnp.asarray(TIMES_E[np.maximum(row_p, 0)].reshape(2, 3))
        weights = {"times_s": times_ws[jax.lax.axis_index(EXPERT)]}
        y_n1 = exchange(x_n1, gate_nk, weights, sent, experts, mesh_layout)
        receipt, _ = make_receipt(sent, Window(0, layout.rows_per_peer), mesh_layout)
        rounds = num_rounds(sent, layout)
        dropped = num_dropped(expert_nk, sent.peer_nk)
        each = (sent.counts_up, sent.assignment_a, dropped, rounds)
        return y_n1[:, 0], receipt.position_nk, *(leaf[None] for leaf in each)

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=split))
    gate_nk = np.tile(GATES, (len(x_n), 1))
    return placement, jax.device_get(run(x_n[:, None], gate_nk, expert_nk))


def shown_outputs(example: str) -> list[np.ndarray]:
    """Return the outputs that the example shows, in exact mode and in capacity mode."""
    lines = re.findall(r"^ device 0:  (.*)device 1:  (.*)$", example, re.MULTILINE)
    return [np.array(" ".join(pair).split(), np.float32) for pair in lines]


def test_the_worked_example_of_the_layer(example):
    placement, (y_n, position_nk, counts, assignments, dropped, rounds) = (
        on_two_devices(example, "exact")
    )
    _, x_n, expert_nk = inputs(example)
    assert_close(y_n, x_n * (TIMES_E[expert_nk] @ GATES))
    assert_close(y_n, shown_outputs(example)[0])
    assert dropped.tolist() == [0, 0]
    assert rounds.tolist() == [2, 2]
    shown = re.findall(r"from device \d +(.*?)   ", example)
    assert counts[0].tolist() == [numbers(row) for row in shown]
    shown = re.search(r"assignment_a .*\n.*", example)[0].split("device ")[1:]
    assert assignments.tolist() == [numbers(row[2:].split("=")[0])[:8] for row in shown]
    shown = re.search(r"round 0, it is `(.*?)`", example, re.DOTALL)[1]
    assert position_nk[:4].reshape(-1).tolist() == numbers(shown)
    tables = {"offer_wo": placement.offer_lwo, "want_wc": placement.want_lwc}
    for name, table in tables.items():
        shown = numbers(re.search(rf"{name} .*?\]\]", example)[0])
        assert table.reshape(-1).tolist() == shown
    shown = re.search(r"fill_ws .*\n.*", example)[0].split("device ")[1:]
    assert placement.fill_lws.tolist() == [numbers(row[2:])[:3] for row in shown]


@pytest.mark.slow
def test_the_worked_example_in_capacity_mode(example):
    _, (y_n, _, _, _, dropped, rounds) = on_two_devices(example, "capacity")
    assert_close(y_n, shown_outputs(example)[1])
    assert dropped.tolist() == [3, 3]
    assert rounds.tolist() == [1, 1]
