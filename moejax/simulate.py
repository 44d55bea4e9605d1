"""Devices that a CPU simulates, by one line before jax is used.

    from moejax import simulate

    simulate.devices(8)

jax counts its devices once, when it is first used, and finds their number in
environment variables. They simulate how arrays are split and what travels between
devices. They share the cores of the machine, so that times say little.
"""

import os
from collections.abc import Mapping

THREADS_PER_DEVICE = 4
"""Threads in XLA:CPU's pool, per device. By default the pool has one per device. But
XLA starts independent collectives of a device at the same time, and each holds a thread
until all devices have joined. With two such collectives the last device may find no
thread left, and the run hangs (seen once)."""

COLLECTIVE_FLAGS = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
)
"""Flags that let collectives wait for 600 s. Eight simulated devices that share two
cores can wait longer for one another than the 40 s after which XLA:CPU aborts."""


def devices(num_devices: int) -> list:
    """Return `num_devices` simulated devices, after making them the only ones of jax.

    jax may be imported before, but not used. Raises ValueError if it has started with
    other devices.
    """
    _check(num_devices)
    os.environ.update(environment(num_devices, os.environ))
    import jax  # reads the variables

    jax.config.update("jax_platforms", "cpu")  # where jax was imported before
    found = jax.devices()
    kinds = {device.platform for device in found}
    if kinds != {"cpu"} or len(found) != num_devices:
        raise ValueError(
            f"jax is in use already, with {len(found)} devices of kind "
            f"{', '.join(sorted(kinds))}, and cannot start again with {num_devices}: "
            f"restart Python (in a notebook, its kernel) and call "
            f"simulate.devices({num_devices}) first"
        )
    return found


def environment(num_devices: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables under which a process that starts jax has so many simulated
    devices. Flags and threads that `environ` sets stay."""
    _check(num_devices)
    count = f"--xla_force_host_platform_device_count={num_devices}"
    threads = str(THREADS_PER_DEVICE * num_devices)
    return {
        "JAX_PLATFORMS": "cpu",
        "PJRT_NPROC": environ.get("PJRT_NPROC", threads),
        "XLA_FLAGS": with_flags(environ, *COLLECTIVE_FLAGS, count),
    }


def with_flags(environ: Mapping[str, str], *flags: str) -> str:
    """Return the text of XLA_FLAGS with `flags` behind those that it has; XLA takes the
    last one of a name."""
    return " ".join([environ.get("XLA_FLAGS", ""), *flags]).strip()


def _check(num_devices: int) -> None:
    """Raise ValueError unless the number of devices is a whole number above 0."""
    if type(num_devices) is not int or num_devices < 1:
        raise ValueError(
            f"num_devices={num_devices!r} must be a whole number of at least 1: use 8"
        )
