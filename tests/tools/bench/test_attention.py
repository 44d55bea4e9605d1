"""Test the benchmark of attention: a tiny run, a wrong result, and bad input."""

import json

import jax
import pytest

from tools.bench import attention

TINY = ["--heads=2", "--key_heads=1", "--width=8", "--repeats=1", "--json"]


def run(capsys, *words: str) -> tuple[int, dict]:
    """Return the exit code and the record of a tiny run."""
    code = attention.main([*TINY, *words])
    return code, json.loads(capsys.readouterr().out.rstrip().rpartition("\n")[2])


@pytest.mark.slow
def test_a_tiny_run(capsys):
    code, record = run(capsys, "--lengths=64,256", "--documents=3")
    assert code == 0
    rows = {(x["impl"], x["tokens"]): x for x in record["times"]}
    assert len(rows) == len(record["times"]) == 2 * len(attention.IMPLS)
    for (impl, _), row in rows.items():
        assert bool(row["declined"]) == ("cudnn" in impl)
        assert row["declined"] or (row["msec"] > 0 and row["is_right"])
    # masked makes all scores: 2 heads * 256 * 256 * 4 bytes are half a MiB.
    assert rows["masked", 256]["mib"] > 0.5 > rows["blocked", 64]["mib"]


@pytest.mark.slow
def test_an_implementation_that_computes_something_else_is_named(capsys, monkeypatch):
    own = jax.nn.dot_product_attention
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda *args, **options: 2 * own(*args, **options),
    )
    code, record = run(capsys, "--lengths=64", "--documents=3")
    assert code == 1
    assert record["error"] == "['blocked'] compute something else"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--documents=0", "--documents must be from 1 to the smallest of --lengths"),
        ("--impls=blocked,dense", "'dense', which is none of"),
        ("--key_heads=3", "3 key heads must divide 8 heads"),
        ("--device=gpu", "there is no GPU here"),
    ],
)
def test_bad_input(argument, message, capsys):
    assert attention.main([argument]) == 2
    assert message in capsys.readouterr().err
