"""Test that no integer of a configuration ends a dry run with a traceback."""

import contextlib
import io
import types
import typing

import pytest

from moejax.config import (
    Config,
    Data,
    Model,
    Moe,
    Optimizer,
    Processes,
    Recorded,
    Train,
)
from moejax.plan.layout import Topology
from train.config import gin_reader
from train.config.names import KINDS
from train.dry_run import dry_run

VALUES = (0, -1, 2**31, 2**63, 800_000_000)
SIZES = ("Model", "Moe", "Mesh", "Dispatch")


def holds_ints(kind) -> bool:
    """Return whether a field of this type can be an int, or several."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType, tuple):
        return any(map(holds_ints, typing.get_args(kind)))
    return kind is int


INT_FIELDS = [name for name, kind in KINDS.items() if holds_ints(kind)]


@pytest.mark.slow
@pytest.mark.parametrize("part", sorted({name.split(".")[0] for name in INT_FIELDS}))
def test_every_int_is_refused_in_one_line_or_is_dry_run(repo, part):
    """Numbers of the four parts in SIZES become sizes; those of the others are only
    refused beyond 64 bits."""
    for field in INT_FIELDS:
        if field.startswith(f"{part}."):
            for value in VALUES if part in SIZES else (2**63, -(2**63)):
                line = refusal(repo, field, value)
                assert "\n" not in line
                assert len(line) <= 500
                is_small = -(2**63) < value < 2**63
                assert is_small or "64 bits" in line, (field, value, line)


def refusal(repo, field: str, value: int) -> str:
    """Return the line with which a dry run refuses a value, or ''."""
    text = f"({value}, {value})" if "tuple" in str(KINDS[field]) else str(value)
    params = [f"{field} = {text}", "Train.num_simulated_devices = None"]
    if field == "Train.num_simulated_devices":
        params.pop()
    try:
        cfg = gin_reader.load([repo / "configs" / "tiny_cpu.gin"], params)
        with contextlib.redirect_stdout(io.StringIO()):
            dry_run(cfg)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: Moe(num_experts=800_000_000), "Moe.num_experts=800000000 must be at"),
        (lambda: Model(num_layers=2**31), "Model.num_layers=2147483648 must be at"),
        (lambda: Model(vocab_size=2**31), "token ids are int32"),
        (lambda: Model(num_heads=2**20, num_kv_heads=1), "products of two, have"),
        (lambda: Moe(num_shared_experts=2**30), "is a width above"),
        (lambda: Train(seed=2**63), "seeds have 64 bits"),
        (lambda: Topology(expert=800_000_000), "Mesh.expert=800000000 must be at most"),
        (lambda: Recorded(hot_share=1.5), "it is a share"),
        (
            lambda: Config(model=Model(num_layers=4096), moe=Moe(num_experts=8192)),
            "every device has a table of all of them",
        ),
        (lambda: Train(num_steps=2**31), "steps are counted in int32"),
        (lambda: Optimizer(warmup_steps=2**31), "steps are counted in int32"),
        (lambda: Processes(watchdog_sec=2**31), "timers count 115 days"),
        (
            lambda: Config(train=Train(batch_size=2**24), data=Data(seq_len=256)),
            "rows are counted in int32",
        ),
    ],
)
def test_rules_of_large_numbers(make, rule):
    with pytest.raises(ValueError, match=rule):
        make()
