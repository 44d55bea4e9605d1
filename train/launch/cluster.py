"""Find out which process of a run this one is, from variables of its launcher.

`tools/launch` sets MOEJAX_COORDINATOR, MOEJAX_NUM_PROCESSES and MOEJAX_PROCESS_ID, and
so may you. Without them jax reads the variables of Open MPI, of SLURM in a step of
srun, and of an indexed Job of Kubernetes (docs/processes.md). This module does not
import jax.
"""

import re
from collections.abc import Mapping
from typing import Any

COORDINATOR = "MOEJAX_COORDINATOR"
NUM_PROCESSES = "MOEJAX_NUM_PROCESSES"
PROCESS_ID = "MOEJAX_PROCESS_ID"
LOCAL_NUM_PROCESSES = "MOEJAX_LOCAL_NUM_PROCESSES"
LOCAL_PROCESS_ID = "MOEJAX_LOCAL_PROCESS_ID"
ATTEMPT = "MOEJAX_ATTEMPT"
"""Variable with the number of earlier starts of this run; 0 where it is not set."""
LOOPBACK = "127.0.0.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"


def detect(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the arguments of jax.distributed.initialize that say which process of how
    many this one is, or None for a run of one process.

    They are empty where jax finds the answer in the variables of a launcher. Raises
    ValueError, in one line, where variables are incomplete or contradict one another.
    """
    env = _given(environ)
    names = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
    if env.get(NUM_PROCESSES) == "1":
        return None
    if not any(name in env for name in names):
        counts = {env.get("OMPI_COMM_WORLD_SIZE", "1")}
        if "SLURM_STEP_NODELIST" in env:  # a batch script by itself has no such list
            counts.add(env.get("SLURM_NTASKS", "1"))
        return {} if counts != {"1"} or "JOB_COMPLETION_INDEX" in env else None
    count, index = _count_and_index(env, names, NUM_PROCESSES, PROCESS_ID)
    address = env[COORDINATOR]
    if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):\d{1,5}", address):
        raise ValueError(
            f"{COORDINATOR}={address!r} must be HOST:PORT, such as node1:61440: give "
            "the address of process 0"
        )
    is_local = address.startswith((f"{LOOPBACK}:", "localhost:", "[::1]:"))
    return {
        "coordinator_address": address,
        "num_processes": count,
        "process_id": index,
        "cluster_detection_method": "deactivate",
        "coordinator_bind_address": address if is_local else None,
    }


def visible_gpus(environ: Mapping[str, str]) -> str:
    """Return the positions of this process's GPUs among those that it sees, such as
    '2,3', or 'all'. JAX_LOCAL_DEVICE_IDS has them where a user sets it.

    The processes of a host share the GPUs in CUDA_VISIBLE_DEVICES equally; where that
    is not set, each takes one. A process takes all that it sees if it is alone on its
    host, if it sees a single one, or if SLURM shows each task its own. Raises
    ValueError where the shares are not equal.
    """
    env = _given(environ)
    if own := env.get("JAX_LOCAL_DEVICE_IDS"):
        return own
    if LOCAL_NUM_PROCESSES in env or LOCAL_PROCESS_ID in env:
        names = (LOCAL_NUM_PROCESSES, LOCAL_PROCESS_ID)
        count, index = _count_and_index(env, names, *names)
    elif "OMPI_COMM_WORLD_LOCAL_SIZE" in env:
        names = ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
        count, index = _count_and_index(env, names, *names)
    elif "SLURM_STEP_NODELIST" in env and "SLURM_GPUS_PER_TASK" not in env:
        names = ("SLURM_STEP_NUM_NODES", "SLURM_NTASKS", "SLURM_LOCALID")
        _require_all(env, names)
        num_nodes, num_tasks, index = (int(env[name]) for name in names)
        count = max(-(-num_tasks // num_nodes), index + 1)
    else:
        return "all"
    num_visible = len(env[VISIBLE].split(",")) if VISIBLE in env else count
    if count == 1 or num_visible == 1:
        return "all"
    if num_visible % count:
        raise ValueError(
            f"{VISIBLE}={env[VISIBLE]} names {num_visible} GPUs, which {count} "
            "processes on this host cannot share equally: change one of the two"
        )
    share = num_visible // count
    return ",".join(map(str, range(index * share, (index + 1) * share)))


def _given(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: text.strip() for name, text in environ.items() if text.strip()}


def _require_all(env: Mapping[str, str], names: tuple[str, ...]) -> None:
    """Raise ValueError unless all names are set."""
    missing = [name for name in names if name not in env]
    if missing:
        given = " ".join(f"{name}={env[name]}" for name in names if name in env)
        raise ValueError(
            f"{given} is set, but not {' and '.join(missing)}: set all, or none"
        )


def _count_and_index(
    env: Mapping[str, str], names: tuple[str, ...], count_name: str, index_name: str
) -> tuple[int, int]:
    """Return the number of processes and the number of this one. Raises ValueError
    unless all names are set, and the two are such numbers."""
    _require_all(env, names)
    words = env[count_name], env[index_name]
    are_whole = all(re.fullmatch(r"\d{1,9}", word, re.ASCII) for word in words)
    if not are_whole or not int(words[1]) < int(words[0]):
        raise ValueError(
            f"{count_name}={words[0]} must be a whole number above {index_name}="
            f"{words[1]}, which is one of 0 or more: number the processes from 0"
        )
    return int(words[0]), int(words[1])
