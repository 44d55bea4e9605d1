"""How every program of this folder begins: place, flags of the backend, processes."""

import os
import pathlib

from moejax.config import Config
from train.launch.cluster import Flags, Place, detect
from train.launch.processes import join

ROOT = pathlib.Path(__file__).resolve().parents[2]

COLLECTIVE_FLAGS = (
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
)
"""Eight simulated devices that share two cores can wait longer for one another than the
40 seconds after which XLA:CPU aborts."""

THREADS_PER_DEVICE = 4
"""XLA:CPU starts independent collectives of a device at the same time, and each keeps a
thread until all devices have come. Its pool has a thread per device: with two such
collectives the last device may find none left, and the run hangs (seen once)."""


def start(cfg: Config, flags: Flags | None = None) -> Place | None:
    """Sets the flags of jax and joins the other processes; None when there are none.

    Raises ValueError when the environment contradicts itself or the configuration.
    """
    place = detect(os.environ, flags)
    set_up_backend(cfg, 1 if place is None else place.count)
    join(cfg, place)
    return place


def set_up_backend(cfg: Config, num_processes: int = 1) -> None:
    """Flags that must stand before jax starts; what the user has set stays."""
    words = [os.environ.get("XLA_FLAGS", ""), *COLLECTIVE_FLAGS]
    if cfg.train.num_simulated_devices:
        total = cfg.train.num_simulated_devices
        if total % num_processes:
            raise ValueError(
                f"Train.num_simulated_devices={total} cannot be shared by "
                f"{num_processes} processes: give a multiple of {num_processes}"
            )
        count = total // num_processes
        words.append(f"--xla_force_host_platform_device_count={count}")
        os.environ.setdefault("PJRT_NPROC", str(THREADS_PER_DEVICE * count))
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join(words).strip()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
