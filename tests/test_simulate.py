"""Simulated devices are there in a fresh Python, whenever jax was imported, and never
silently others."""

import subprocess
import sys

import jax
import pytest

from moejax import simulate

FLAGS = "--xla_force_host_platform_device_count=5 --xla_cpu_enable_fast_math=false"


@pytest.mark.parametrize(
    ("first", "environ"),
    [("", {"XLA_FLAGS": FLAGS}), ("import jax; ", {})],
    ids=["jax not imported, flags of the user", "jax imported"],
)
def test_a_fresh_python_has_the_devices(repo, first, environ):
    source = (
        f"{first}from moejax import simulate; simulate.devices(3); import jax; "
        "print(len(jax.devices()), jax.devices()[0].platform)"
    )
    done = subprocess.run(
        [sys.executable, "-c", source],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(repo)} | environ,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "3 cpu\n", done.stderr


def test_another_number_is_refused_once_jax_is_in_use(monkeypatch):
    assert simulate.devices(jax.device_count()) == jax.devices()
    for name in simulate.environment(3, {}):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
    with pytest.raises(ValueError, match="is in use already, with 8 devices") as error:
        simulate.devices(3)
    assert "restart Python" in str(error.value)


@pytest.mark.parametrize("number", [0, -1, 2.0, True, "8"])
def test_a_number_of_devices_is_a_whole_number(number):
    with pytest.raises(ValueError, match="must be a whole number of at least 1"):
        simulate.devices(number)


def test_flags_and_threads_of_the_user_stay():
    own = {"XLA_FLAGS": FLAGS, "PJRT_NPROC": "7", "HOME": "/h"}
    found = simulate.environment(3, own)
    assert set(found) == {"JAX_PLATFORMS", "XLA_FLAGS", "PJRT_NPROC"}
    assert found["PJRT_NPROC"] == "7"
    flags = found["XLA_FLAGS"].split()
    assert flags[: len(FLAGS.split())] == FLAGS.split()
    assert flags[-1] == "--xla_force_host_platform_device_count=3"
