"""The room on a device, which is checked before a compiled step runs."""

import types

import jax
import jax.numpy as jnp
import pytest

from train.balance import balancing
from train.balance.ahead import Ahead
from train.step import compiled

GIB = 2**30
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


def test_a_step_that_does_not_fit_says_by_how_much(compiled_step, monkeypatch):
    needed = compiled.device_bytes(compiled_step.memory_analysis())
    with_limit(monkeypatch, needed)
    compiled.require_room(compiled_step)
    fields = dict.fromkeys(("temp", "output", "alias"), 0) | {"argument": 75 * GIB}
    fields = {f"{name}_size_in_bytes": size for name, size in fields.items()}
    memory = types.SimpleNamespace(**fields)
    step = types.SimpleNamespace(memory_analysis=lambda: memory)
    with_limit(monkeypatch, 73 * GIB + GIB // 2)
    with pytest.raises(ValueError, match=r"1\.5 GiB too much") as error:
        compiled.require_room(step)
    assert "needs 75.0 GiB on a device, and JAX has 73.5 GiB" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_first_step_and_those_of_a_relayout_are_checked(compiled_step, monkeypatch):
    with_limit(monkeypatch, 2 * 4 * NUMBERS - 1)
    steps = compiled.Steps(compiled_step, None)
    ready, fault = Ahead(lambda: steps).result()
    assert ready is None
    assert "GiB too much" in fault
    monkeypatch.setattr(balancing, "compile_steps", lambda model: steps)
    model = types.SimpleNamespace(relaid=lambda layout: None)
    run = types.SimpleNamespace(
        layout=None,
        _start_planner=lambda: None,
        _job=types.SimpleNamespace(model=model),
    )
    with pytest.raises(ValueError, match="GiB too much"):
        balancing.Balancing.compile(run)
