"""Test the benchmark of attention: its documents, a tiny run, and bad input."""

import json

import numpy as np
import pytest

from tools.bench import attention

TINY = ["--heads=2", "--key_heads=1", "--width=8", "--repeats=1"]


def test_documents_have_random_edges_and_a_given_number():
    first_t = attention.draw_first_keys(np.random.default_rng(0), 40, 8)
    assert len(first_t) == 40
    assert len(set(first_t.tolist())) == 8
    assert all(first_t[key] == key for key in first_t)
    assert attention.draw_first_keys(np.random.default_rng(0), 1, 1).tolist() == [0]


def test_the_exponent_is_the_slope_of_logarithms():
    rows = [{"tokens": t, "bytes": 3 * t**1.5} for t in (16, 64, 1024)]
    assert attention.exponent(rows) == pytest.approx(1.5)


@pytest.mark.slow
def test_a_tiny_run(capsys):
    argv = ["--lengths=64", "--documents=1,3", "--memory_lengths=64,256", "--json"]
    assert attention.main([*TINY, *argv]) == 0
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    record = json.loads(last)
    assert list(record["declined"]) == ["masked_cudnn", "hopper", "cudnn"]
    assert all(
        f"{impl} is left out: it needs a GPU" in text for impl in record["declined"]
    )
    cases = [(row["impl"], row["tokens"], row["documents"]) for row in record["times"]]
    impls = "masked", "blocked"
    assert cases == [(impl, 64, number) for number in (1, 3) for impl in impls]
    for row in record["times"]:
        assert row["msec"] > 0
        assert row["error"] < 1e-5
    sizes = {(row["impl"], row["tokens"]): row["bytes"] for row in record["memory"]}
    # masked makes all scores: 2 heads * 256 * 256 * 4 bytes are half a MiB.
    assert sizes["masked", 256] > 2**19 > sizes["blocked", 64]
    assert record["exponents"]["masked"] > record["exponents"]["blocked"]


def test_a_form_that_computes_something_else_is_refused():
    settings = attention.Settings("cpu", "float32", 1, 2, 1, 8)
    errors = {"masked": 0.0, "blocked": 1e-3}
    with pytest.raises(
        attention.WrongResult, match=r"blocked differs from masked by 0.001"
    ):
        attention.check(errors, settings, (64, 3))
    attention.check(errors, settings._replace(dtype="bfloat16"), (64, 3))
    with pytest.raises(attention.WrongResult):
        attention.check({"masked": 0.0, "blocked": float("nan")}, settings, (64, 3))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--lengths=12,x", "--lengths 12,x is not numbers"),
        ("--documents=0", "--documents 0 must be numbers of at least 1"),
        ("--documents=600", "--documents 600 in --lengths 512 tokens"),
        ("--impls=blocked,dense", "'dense', which is none of"),
        ("--key_heads=3", "key heads must divide heads"),
        ("--device=gpu", "there is no GPU here"),
    ],
)
def test_bad_input(argument, message, capsys):
    assert attention.main([argument]) == 2
    assert message in capsys.readouterr().err
