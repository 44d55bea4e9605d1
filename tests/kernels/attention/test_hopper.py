"""The Hopper kernels of attention against its definition, in the Mosaic GPU interpreter
with its race detector, and their tables of blocks.

The cases are documents of one token, edges at and beside the borders of tiles, random
edges, groups of heads, windows, and lengths that no tile divides.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)

from moejax.kernels.attention.hopper import (
    dkv_kernel,
    dq_kernel,
    forward_kernel,
    kernels,
    scores,
)
from moejax.kernels.attention.hopper.scores import ROWS, TILE
from moejax.kernels.attention.reading import CAUSAL, KeyRange, Rule, key_range
from moejax.kernels.grouped_dot.hopper.ring import Ring
from tests.support.close import assert_close
from tests.support.hopper_attention import (
    BORDERS,
    Setup,
    expected,
    interpreted,
    make_dout,
    make_inputs,
    random_edges,
    watch_races,
)

FULL = Rule(is_causal=False)
PLAIN = Setup(heads=(1, 1))
MIXED = [0, 5, 64, 65, 127, 129, 200]
"""Documents of one token and of more, with edges at and beside borders."""
ALL_ROWS = [
    [0],
    list(range(256)),
    [0, *BORDERS],
    *(random_edges(256, 5, s) for s in (0, 1)),
]


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    """Reset the interpreter: the state of a failed kernel would fail the next one."""
    yield
    reset_gpu_interpret_mode_state()


def check(monkeypatch, setup, rows):
    """Assert that output and gradients are those of the definition."""
    inputs, dout_bthj = make_inputs(setup, rows), make_dout(setup, len(rows))
    actual = interpreted(inputs, setup.rule, dout_bthj, monkeypatch)
    del actual["lse"]
    assert all(array.dtype == setup.dtype for array in actual.values())
    assert_close(actual, expected(inputs, setup.rule, dout_bthj))


@pytest.mark.slow
def test_documents_and_blocks_that_nobody_reads(monkeypatch):
    """Keys and values that nobody reads are NaN here, and would reach a result if their
    blocks were read: 0 times NaN is NaN."""
    setup = Setup(t=256, u=384, start=128)
    rows = [[TILE + edge for edge in MIXED]]
    inputs, dout_bthj = make_inputs(setup, rows), make_dout(setup, num_rows=1)
    is_read_u = np.arange(384) >= TILE
    dirty = inputs._replace(
        k_bugi=jnp.where(is_read_u[:, None, None], inputs.k_bugi, jnp.nan),
        v_bugj=jnp.where(is_read_u[:, None, None], inputs.v_bugj, jnp.nan),
    )
    actual = interpreted(dirty, setup.rule, dout_bthj, monkeypatch)
    del actual["lse"]
    assert_close(actual, expected(inputs, setup.rule, dout_bthj))


@pytest.mark.long
@pytest.mark.parametrize(
    ("setup", "rows"),
    [
        pytest.param(setup, rows, id=name)
        for name, (setup, rows) in {
            "all rows": (Setup(), ALL_ROWS),
            "one group": (PLAIN, [MIXED]),
            "float16": (Setup(dtype="float16"), [MIXED]),
            "groups of four": (Setup(heads=(4, 1)), [MIXED]),
            "four groups": (Setup(heads=(4, 4)), [MIXED]),
            "wide heads": (Setup(widths=(128, 128)), [MIXED]),
            "two widths": (Setup(widths=(128, 64)), [MIXED]),
            "window": (Setup(rule=Rule(window=70)), [[0], MIXED]),
            "window of one": (Setup(rule=Rule(window=1)), [MIXED]),
            "soft cap": (Setup(rule=Rule(soft_cap=0.7)), [MIXED]),
            "scale": (Setup(rule=Rule(scale=0.5)), [MIXED]),
            "all keys of a document": (Setup(rule=FULL), ALL_ROWS),
            "200 tokens": (Setup(t=200), [[0], [0, 63, 130, 199]]),
            "300 tokens": (Setup(t=300, rule=FULL), [random_edges(300, 4, 2)]),
            "one token": (Setup(t=1), [[0]]),
            "later queries": (Setup(t=100, u=300, start=190), [[0], [0, 191, 250]]),
            "unread keys": (Setup(t=128, u=384, start=60), [[0, 100]]),
        }.items()
    ],
)
def test_cases(monkeypatch, setup, rows):
    check(monkeypatch, setup, rows)


@pytest.mark.long
def test_the_logarithm_of_the_sum():
    """A query that reads only its own key has its own score."""
    setup = Setup(t=128, heads=(1, 1), dtype="float16")
    inputs = make_inputs(setup, [list(range(128))])
    q_bthi, k_bugi = (array.astype(jnp.float32) for array in inputs[:2])
    score_bht = jnp.einsum("bthi,bthi->bht", q_bthi, k_bugi) / 8
    assert_close(interpreted(inputs, setup.rule)["lse"], score_bht, dtype="float16")


UNOBSERVED = "observed .*phase|observe each barrier completion|must do so in all phases"
"""Pattern of the interpreter's errors for a barrier that nobody waits for."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("holder", "name", "message"),
    [
        (Ring, "await_empty", UNOBSERVED),
        (Ring, "await_full", UNOBSERVED),
        (forward_kernel, "commit_smem", None),
        (dq_kernel, "commit_smem", None),
        (dkv_kernel, "commit_smem", None),
    ],
)
def test_a_missing_synchronization_is_detected(monkeypatch, holder, name, message):
    """The interpreter reports a race, or a barrier that nobody waited for."""
    if holder is Ring:
        monkeypatch.setattr(Ring, name, lambda *args: None)
    else:
        rest = vars(holder.plgpu) | {name: lambda *args: None}
        monkeypatch.setattr(holder, "plgpu", types.SimpleNamespace(**rest))
    setup = Setup(t=384, heads=(2, 1))
    inputs, states = make_inputs(setup, [[0]]), watch_races(monkeypatch)
    run = functools.partial(
        interpreted, inputs, setup.rule, make_dout(setup, num_rows=1)
    )
    if message is None:
        run()
        assert any(state.races_found for state in states)
        return
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=message):
        run()


def read_pairs(keys: KeyRange, num_keys: int) -> np.ndarray:
    """Return whether each query reads each key, [b, t, u]."""
    low_bt, high_bt = map(np.asarray, keys)
    key_u = np.arange(num_keys)
    return (key_u >= low_bt[..., None]) & (key_u < high_bt[..., None])


@pytest.mark.parametrize("rule", [CAUSAL, FULL, Rule(window=1), Rule(window=200)])
def test_tables_name_the_blocks_that_are_read(rule):
    setup = Setup(t=1024)
    random_rows = [random_edges(1024, count, seed=count) for count in (3, 9, 30, 90)]
    rows = [[0], [0, 128, 512], *random_rows]
    keys = key_range(make_inputs(setup, rows), rule)
    is_read_btu = read_pairs(keys, 1024)
    check_table(scores.key_table(keys), blocked(is_read_btu, TILE))
    by_keys = blocked(is_read_btu, ROWS).transpose(0, 2, 1, 3, 4)
    check_table(scores.query_table(keys, 1024), by_keys)


def blocked(is_read_btu, queries):
    """Return whether each query reads each key, [b, blocks, tiles, queries, TILE]."""
    b, t, u = is_read_btu.shape
    pairs = is_read_btu.reshape(b, t // queries, queries, u // TILE, TILE)
    return pairs.swapaxes(2, 3)


def check_table(table_bn4, is_read_bncax):
    """Assert that the blocks of each tile are from the first to the last that is read,
    and that is_cut tells which of them need a mask."""
    is_any_bnc, is_all_bnc = is_read_bncax.any((3, 4)), is_read_bncax.all((3, 4))
    table_bn4, block_c = np.asarray(table_bn4), np.arange(is_any_bnc.shape[2])
    for row, tile in np.ndindex(table_bn4.shape[:2]):
        needed = scores.needed(table_bn4, row, tile)
        is_named_c = (needed.begin <= block_c) & (block_c < needed.end)
        np.testing.assert_array_equal(is_named_c, is_any_bnc[row, tile])
        is_cut_c = needed.is_cut(block_c)
        is_masked_c = is_any_bnc[row, tile] & ~is_all_bnc[row, tile]
        np.testing.assert_array_equal(is_named_c & is_cut_c, is_masked_c)


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        (Setup(dtype="float32"), "dtype float32 is not one of bfloat16, float16"),
        (Setup(widths=(80, 64)), "heads of 80 values; 64 or 128 are needed"),
        (Setup(widths=(64, 256)), "heads of 256 values; 64 or 128 are needed"),
        (Setup(rule=Rule(scale=-1.0)), "scale=-1.0 is not above 0"),
    ],
)
def test_declines(setup, why):
    inputs = make_inputs(setup, [[0]])
    assert kernels.declines(inputs, setup.rule) == why
    with pytest.raises(NotImplementedError, match=f"{why}: use implementation="):
        kernels.forward(inputs, setup.rule, interpret=True)


def test_declines_dtypes_that_differ():
    inputs = make_inputs(PLAIN, [[0]])
    inputs = inputs._replace(v_bugj=inputs.v_bugj.astype(jnp.float16))
    why = "queries, keys and values have different dtypes, bfloat16, bfloat16, float16"
    assert kernels.declines(inputs, CAUSAL) == why


def test_declines_a_device_that_is_no_hopper():
    inputs = make_inputs(PLAIN, [[0]])
    assert kernels.declines(inputs, CAUSAL) is None
    why = "the kernels are for Hopper, not cpu: use implementation='blocked'"
    with pytest.raises(NotImplementedError, match=why):
        kernels.forward(inputs, CAUSAL)
