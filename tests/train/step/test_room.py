"""The room on a device, which is checked before a compiled step runs."""

import re
import types

import jax
import jax.numpy as jnp
import pytest

from train.balance import balancing
from train.balance.ahead import Ahead
from train.step import compiled

NUMBERS = 2**20


@pytest.fixture
def compiled_step():
    """A compiled program of 4 MiB of state that it donates and 4 MiB that it reads."""
    step = jax.jit(lambda state, x: (state + 1, jnp.sum(x)), donate_argnums=0)
    shape = jax.ShapeDtypeStruct((NUMBERS,), jnp.float32)
    return step.lower(shape, shape).compile()


def with_limit(monkeypatch, num_bytes: int) -> None:
    """Let the devices report this limit, as GPUs do."""
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": num_bytes})
    monkeypatch.setattr(compiled.jax, "local_devices", lambda: [device])


def test_donated_state_counts_once(compiled_step):
    memory = compiled_step.memory_analysis()
    state_and_x = 2 * 4 * NUMBERS
    assert memory.output_size_in_bytes >= 4 * NUMBERS
    rest = compiled.device_bytes(memory) - memory.temp_size_in_bytes - state_and_x
    assert 0 <= rest < 1024
    sizes = {"argument": 8, "temp": 4, "output": 2, "alias": 1}
    sizes = {f"{name}_size_in_bytes": size for name, size in sizes.items()}
    assert compiled.device_bytes(types.SimpleNamespace(**sizes)) == 13


def test_steps_that_do_not_fit_are_refused(compiled_step, monkeypatch):
    """The first step of a run, and those of a relayout, are checked."""
    needed = compiled.device_bytes(compiled_step.memory_analysis())
    with_limit(monkeypatch, needed)
    compiled.require_room(compiled_step)
    with_limit(monkeypatch, needed - 1)
    steps = compiled.Steps(compiled_step, None)
    ready, fault = Ahead(lambda: steps).result()
    assert ready is None
    assert re.match("ValueError: the step needs .* GiB too much", fault)
    monkeypatch.setattr(balancing, "compile_steps", lambda model: steps)
    model = types.SimpleNamespace(relaid=lambda layout: None)
    run = types.SimpleNamespace(
        layout=None,
        _start_planner=lambda: None,
        _job=types.SimpleNamespace(model=model),
    )
    with pytest.raises(ValueError, match="GiB too much"):
        balancing.Balancing.compile(run)
