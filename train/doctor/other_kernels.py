"""Checks of the row permutations, of attention and of the water-filling split."""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.axes import devices_of
from moejax.kernels.attention import attention
from moejax.kernels.attention.choose import why_not
from moejax.kernels.attention.reading import Inputs, Rule
from moejax.kernels.permute import combine_rows, gather_rows
from moejax.moe.split import water_filling as split
from moejax.moe.types import Placement
from moejax.plan import water_filling
from moejax.plan.expert_plan import EMPTY, ExpertPlan
from moejax.plan.layout import Layout
from moejax.resolve.kernels import attention_arrays, attention_rules
from moejax.resolve.resolved import Resolved
from train.doctor import definitions
from train.doctor.kernel_check import (
    KernelCheck,
    allowed_error,
    find_subject,
    largest_error,
)

LENGTHS = (200, 256)
"""Numbers of tokens for attention, the first that the implementation takes; else those
of the run's windows."""
MAX_WINDOW = 50
"""Largest window of keys of sliding layers; documents have more tokens."""
NUM_TOKENS = 37
"""Number of tokens whose rows are permuted."""
SPARE_ROWS = 11
"""Number of rows of the buffer that no token has."""


def permute_check(run: Resolved) -> KernelCheck:
    """Return the check of both permutations of rows and of their gradients."""
    choice = run.kernels["permute"].implementation
    how, subject = find_subject("permute", choice, run)

    def measure(case):
        positions_nk, assignment_m = case["positions"], case["assignment"]
        source_m = jnp.where(
            assignment_m < 0, EMPTY, assignment_m // positions_nk.shape[1]
        )

        def gather(x_nd):
            return gather_rows(x_nd, source_m, positions_nk, implementation=choice)

        def combine(y_md, gate_nk):
            tables = positions_nk, assignment_m
            return combine_rows(y_md, gate_nk, *tables, implementation=choice)

        gathered_md, back = jax.vjp(gather, case["x"])
        actual = {"gathered": gathered_md, "dx": back(case["dx"])[0]}
        actual["combined"], back = jax.vjp(combine, case["y"], case["gate"])
        actual["dy"], actual["dgate"] = back(case["dout"])
        return _largest(actual, case["expected"])

    cases = [_permute_case(run)]
    name = f"permutations of rows ({how})"
    return KernelCheck(name, subject, allowed_error(run), measure, cases)


def _permute_case(run: Resolved) -> dict:
    """Return rows, tables of both permutations, and expected results. Rows that no
    token has hold NaN."""
    cfg, rng = run.cfg, np.random.default_rng(1)
    (n, k), d = (NUM_TOKENS, cfg.moe.top_k), cfg.model.d_model
    if cfg.router.gate_input:  # each choice is a token of its own
        k = 1
    dtype = jnp.dtype(cfg.model.compute_dtype)
    m = n * k + SPARE_ROWS

    positions_nk = rng.permutation(m)[: n * k].reshape(n, k)
    positions_nk[rng.random((n, k)) < 0.2] = EMPTY
    assignment_m = np.full(m, EMPTY)
    is_here_nk = positions_nk >= 0
    assignment_m[positions_nk[is_here_nk]] = np.flatnonzero(is_here_nk)
    is_used_m = assignment_m >= 0

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    x_nd, y_md, dx_md, dout_nd = draw(n, d), draw(m, d), draw(m, d), draw(n, d)
    gate_nk = rng.random((n, k)).astype(np.float32)
    wide = [each.astype(np.float64) for each in (x_nd, y_md, dx_md, dout_nd)]
    x, y, dx, dout = wide
    gate = np.where(is_here_nk, gate_nk, 0).astype(np.float64)
    token_m, choice_m = assignment_m // k, assignment_m % k
    used_m1 = is_used_m[:, None]
    expected = {
        "gathered": np.where(used_m1, x[token_m], 0),
        "dx": np.where(is_here_nk[..., None], dx[positions_nk], 0).sum(1),
        "combined": np.einsum("nk,nkd->nd", gate, y[positions_nk]),
        "dy": np.where(used_m1, gate[token_m, choice_m][:, None] * dout[token_m], 0),
        "dgate": np.where(
            is_here_nk, np.einsum("nd,nkd->nk", dout, y[positions_nk]), 0
        ),
    }
    for rows in (y_md, dx_md):
        rows[~is_used_m] = np.nan
    return {
        "x": x_nd, "y": y_md, "gate": gate_nk, "dx": dx_md, "dout": dout_nd,
        "positions": positions_nk.astype(np.int32),
        "assignment": assignment_m.astype(np.int32),
        "expected": {key: np.float32(value) for key, value in expected.items()},
    }  # fmt: skip


def attention_checks(run: Resolved) -> list[KernelCheck]:
    """Return a check of attention, with its gradients, for each rule that the run's
    layers have; chunks are documents to it."""
    choices, checks = run.kernels, []
    for kind, rule in attention_rules(run.cfg).items():
        choice = choices["attention"]
        if kind == "sliding":
            choice = choices.get("attention in sliding layers", choice)
        checks.append(_attention_check(run, choice.implementation, rule))
    return checks


def _attention_check(run: Resolved, choice: str, rule: Rule) -> KernelCheck:
    """Return the check of attention over a row of tokens with four documents."""
    kernel = "attention_cudnn" if choice == "cudnn" else "attention"
    how, subject = find_subject(kernel, choice, run)
    given, rng = attention_arrays(run.cfg), np.random.default_rng(2)
    if rule.window is not None:  # one that is shorter than a document
        rule = rule._replace(window=min(rule.window, MAX_WINDOW))
    with devices_of(run.mesh):
        t = _length(choice, given, rule)

    def draw(array, width):
        return rng.standard_normal((1, t, array.shape[2], width)).astype(array.dtype)

    q, k, v = (draw(array, array.shape[3]) for array in given[:3])
    dout = draw(given.q_bthi, given.v_bugj.shape[3])
    num_sinks = q.shape[2] * run.cfg.attention.sinks
    sinks = (np.float32(rng.standard_normal(num_sinks)),) if num_sinks else ()
    edges = [0, t // 8 + 1, t // 8 + 2, t // 2 + 1]
    first_bt = np.repeat(edges, np.diff([*edges, t]))[None].astype(np.int32)
    results = definitions.attention(
        *(a.astype(np.float64) for a in (q, k, v)), first_bt, dout.astype(np.float64),
        scale=rule.scale, window=rule.window, sinks_h=np.float64(sinks).ravel(),
    )  # fmt: skip
    names = ("out", "dq", "dk", "dv", "dsinks")
    expected = dict(zip(names, map(np.float32, results)))

    def measure(case):
        def call(q, k, v, *sinks):
            options = {"rule": rule, "sinks_h": sinks[0] if sinks else None}
            first_bt = case["first"]
            return attention(q, k, v, first_bt, implementation=choice, **options)

        out, back = jax.vjp(call, *case["arrays"])
        return _largest(dict(zip(names, (out, *back(case["dout"])))), case["expected"])

    case = {"arrays": (q, k, v, *sinks), "first": first_bt, "dout": dout}
    words = [how, *(["sinks"] if sinks else []), f"{t} tokens"]
    words += [] if rule.window is None else [f"a window of {rule.window}"]
    name = f"attention ({', '.join(words)})"
    case["expected"] = expected
    return KernelCheck(name, subject, allowed_error(run), measure, [case])


def _length(implementation: str, given: Inputs, rule: Rule) -> int:
    """Return the number of tokens to compute attention of."""
    whole = given.q_bthi.shape[1]

    def of_length(array, t):
        return jax.ShapeDtypeStruct((1, t, *array.shape[2:]), array.dtype)

    for t in LENGTHS:
        q, k, v, first = (of_length(array, t) for array in given[:4])
        inputs = Inputs(q, k, v, first, given.start)
        if t < whole and why_not(implementation, inputs, rule) is None:
            return t
    return whole


def water_fill_check(run: Resolved) -> KernelCheck:
    """Return the check of the water-filling split, whose integers are compared
    exactly."""
    layout = run.layout.exchanged
    how = "fused" if layout.fused_split else "portable"
    subject = "Dispatch.fused_split" if layout.fused_split else ""
    row_p = _spread(layout)
    owned_e = np.arange(layout.num_experts)
    plan = ExpertPlan(row_p[None], layout.num_experts, owned_e[None])
    load_e = 10_000 // (1 + np.random.default_rng(3).permutation(layout.num_experts))
    expected = water_filling.fill(load_e, row_p, layout.num_devices)
    placement = Placement.from_plan(plan, layout).layer(0)
    case = {
        "load": load_e.astype(np.int32), "placement": placement,
        "rows": expected.rows_p.astype(np.float32),
    }  # fmt: skip

    def measure(case):
        placement = case["placement"]
        filled = split.fill(case["load"], placement, layout, jnp.int32(0))
        rows_p = jnp.zeros_like(filled.rows_q).at[placement.slot_lq].set(filled.rows_q)
        return largest_error(rows_p, case["rows"])

    return KernelCheck(f"water-filling ({how})", subject, 0.0, measure, [case])


def _spread(layout: Layout) -> np.ndarray:
    """Return which expert each slot of a layout holds: on each device its own, then in
    spare slots those that follow."""
    s, own, e = layout.slots_per_device, layout.experts_per_device, layout.num_experts
    first_w1 = own * np.arange(layout.num_devices)[:, None]
    return ((first_w1 + np.arange(s)) % e).reshape(-1).astype(np.int32)


def _largest(actual: dict, expected: dict):
    """Return the largest relative error of several results."""
    pairs = ((actual[name], expected[name]) for name in expected)
    errors = [largest_error(*pair) for pair in pairs]
    return jnp.max(jnp.stack(errors))
