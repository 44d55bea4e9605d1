"""Test the benchmark of the layer: a tiny run as a user starts it, and bad input."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from moejax.config import Moe
from tools.bench import moe_layer, moe_variants

VARIANTS = ["dense", "einsum", "ragged_dot", "moejax"]
TINY = "--d 32 --f 16 --tokens 32 --experts 16 --devices 4 --repeats 1"


def bench(repo, *arguments: str) -> subprocess.CompletedProcess:
    # The program sets XLA_FLAGS itself.
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [
        sys.executable,
        str(repo / "tools" / "bench" / "moe_layer.py"),
        *arguments,
    ]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.long
def test_all_variants_run_and_are_reported(repo):
    process = bench(repo, "--json", *TINY.split())
    assert process.returncode == 0, process.stderr
    record = json.loads(process.stdout.splitlines()[-1])
    rows = {(row["impl"], row["pass"]): row for row in record["rows"]}
    assert list(rows) == [
        (variant, which) for which in ("fwd", "fwd_bwd") for variant in VARIANTS
    ]
    for (_, which), row in rows.items():
        ours = rows["moejax", which]["msec"]
        assert row["msec"] > 0
        assert row["temp_mib"] > 0
        assert row["ratio_to_moejax"] == pytest.approx(row["msec"] / ours)


def test_a_variant_that_does_not_fit_is_a_row_of_its_own(monkeypatch):
    def too_large(_params, _x_btd):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 32 GiB\nmore lines")

    def as_large(params, x_btd):
        return jnp.sum(x_btd) + params

    programs = {"dense": (as_large, jnp.ones(())), "einsum": (too_large, ())}
    programs["moejax"] = programs["dense"]
    monkeypatch.setattr(moe_variants, "variants", lambda *_: programs)
    moe = Moe(num_experts=4, top_k=2, d_expert=16)
    case = moe_variants.make_case(moe, 16, 32, "float32", jax.devices()[:1])
    (rows, _) = moe_layer.measure(case, 1, 1)
    assert [row["impl"] for row in rows] == ["dense", "moejax", "einsum"]
    assert rows[1]["msec"] > 0
    failed = {"impl": "einsum", "pass": "fwd", "msec": None}
    assert rows[2] == failed | {"failed": "RESOURCE_EXHAUSTED: 32 GiB"}


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ("--experts 20 --devices 8", "num_experts=20 must be divisible"),
        ("--repeats 0", "--repeats 0 must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, monkeypatch, arguments, rule):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # the program adds to them
    assert moe_layer.main(arguments.split()) == 2
    err = capsys.readouterr().err
    assert rule in err
    assert err.count("\n") == 1
