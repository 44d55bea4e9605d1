"""Which process of which run this one is: from flags, else from the environment.

    asked in this order           count, index                  coordinator
    flags                         --num_processes, --process_id --coordinator
    MOEJAX_*                      MOEJAX_NUM_PROCESSES, .._ID   MOEJAX_COORDINATOR
    Kubernetes, with the first    .., JOB_COMPLETION_INDEX      MOEJAX_COORDINATOR
    Open MPI                      OMPI_COMM_WORLD_SIZE, .._RANK host of mpirun
    SLURM, in a step of srun      SLURM_NTASKS, SLURM_PROCID    first host of the step

MOEJAX_COORDINATOR alone replaces the coordinator of the last two. Open MPI is asked
before SLURM: mpirun within a SLURM job starts one daemon per host with srun, and
SLURM's variables count the daemons. Where all processes are on one host the coordinator
is 127.0.0.1. This module imports no jax.
"""

import argparse
import dataclasses
import re
import zlib
from collections.abc import Mapping

COORDINATOR = "MOEJAX_COORDINATOR"
NUM_PROCESSES = "MOEJAX_NUM_PROCESSES"
PROCESS_ID = "MOEJAX_PROCESS_ID"
LOCAL_NUM_PROCESSES = "MOEJAX_LOCAL_NUM_PROCESSES"
LOCAL_PROCESS_ID = "MOEJAX_LOCAL_PROCESS_ID"
COMPLETION_INDEX = "JOB_COMPLETION_INDEX"
ATTEMPT = "MOEJAX_ATTEMPT"
"""How often launchers have started this run before; unset is never."""

LOOPBACK = "127.0.0.1"
FIRST_PORT, NUM_PORTS = 61440, 4096
"""Above the ports that Linux gives to outgoing connections (32768 to 60999)."""


@dataclasses.dataclass(frozen=True)
class Flags:
    """Arguments of the command line: all three or none."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """One of several processes of a run."""

    count: int
    """Processes of the run, at least 2."""
    index: int
    coordinator: str
    """HOST:PORT, of process 0."""
    source: str
    """Who said so: 'flags', 'MOEJAX', 'Kubernetes', 'Open MPI' or 'SLURM'."""
    local_index: int | None = None
    """Among the processes of this host, where that is known."""
    local_device_ids: tuple[int, ...] | None = None
    """Places of this process's GPUs among those it sees; None: all are its own."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `cluster_flags` reads."""
    add = parser.add_argument
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="address of process 0 in a run of several processes; needs the next two "
        "(default: as the launcher's environment says, else one process)",
    )
    add(
        "--num_processes",
        type=int,
        metavar="N",
        help="number of processes of the run (default: as for --coordinator)",
    )
    add(
        "--process_id",
        type=int,
        metavar="I",
        help="number of this process, 0 to N - 1 (default: as for --coordinator)",
    )


def cluster_flags(args: argparse.Namespace) -> Flags:
    return Flags(args.coordinator, args.num_processes, args.process_id)


def detect(
    environ: Mapping[str, str], flags: Flags | None = None
) -> ProcessInfo | None:
    """Return which process of its run this one is; None for a run of one process.

    Raises ValueError, in one line, when what is set is incomplete or contradictory.
    """
    env = {name: text.strip() for name, text in environ.items() if text.strip()}
    process = _from_flags(flags)
    for ask in (_from_ours, _from_open_mpi, _from_slurm):
        process = process or ask(env)
    return process if process is not None and process.count > 1 else None


def is_loopback(coordinator: str) -> bool:
    """Return whether HOST or HOST:PORT is this machine, reached from nowhere else."""
    host = coordinator
    if coordinator.startswith("["):
        host = coordinator[1:].partition("]")[0]
    elif coordinator.count(":") == 1:  # a bare IPv6 address has more
        host = coordinator.partition(":")[0]
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d+){3}", host))


def _from_flags(flags: Flags | None) -> ProcessInfo | None:
    words = {} if flags is None else {
        "--coordinator": flags.coordinator,
        "--num_processes": flags.num_processes,
        "--process_id": flags.process_id,
    }  # fmt: skip
    words = {name: str(word) for name, word in words.items() if word is not None}
    if not words:
        return None
    names = ("--coordinator", "--num_processes", "--process_id")
    _require_all(words, names, "give all three, or none")
    coordinator = _address(words, "--coordinator")
    count, index = _count_and_index(words, *names[1:])
    return ProcessInfo(count, index, coordinator, "flags")


def _from_ours(env: Mapping[str, str]) -> ProcessInfo | None:
    said = [x for x in (COORDINATOR, NUM_PROCESSES, PROCESS_ID) if x in env]
    if not said:
        return None
    launched = _is_open_mpi(env) or _is_slurm(env)
    if said == [COORDINATOR] and launched and COMPLETION_INDEX not in env:
        return None
    index_name = PROCESS_ID
    if PROCESS_ID not in env and COMPLETION_INDEX in env:
        index_name = COMPLETION_INDEX
    names = (COORDINATOR, NUM_PROCESSES, index_name)
    _require_all(env, names, "set all three, or none")
    count, index = _count_and_index(env, NUM_PROCESSES, index_name)
    coordinator = _address(env, COORDINATOR)
    source = "Kubernetes" if index_name == COMPLETION_INDEX else "MOEJAX"
    locally = [x for x in (LOCAL_NUM_PROCESSES, LOCAL_PROCESS_ID) if x in env]
    if not locally:
        return ProcessInfo(count, index, coordinator, source)
    names = (LOCAL_NUM_PROCESSES, LOCAL_PROCESS_ID)
    _require_all(env, names, "set both, or none")
    local_count, local_index = _count_and_index(env, *names)
    gpus = _share_of_gpus(local_index, local_count, env)
    return ProcessInfo(count, index, coordinator, source, local_index, gpus)


def _is_open_mpi(env: Mapping[str, str]) -> bool:
    return "OMPI_COMM_WORLD_SIZE" in env or "OMPI_COMM_WORLD_RANK" in env


def _from_open_mpi(env: Mapping[str, str]) -> ProcessInfo | None:
    """Open MPI 4 names the host of mpirun; 5 does not, and can start one host alone."""
    if not _is_open_mpi(env):
        return None
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    local_names = ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    _require_all(env, (*names, *local_names), f"start with mpirun, or set {PROCESS_ID}")
    count, index = _count_and_index(env, *names)
    local_count, local_index = _count_and_index(env, *local_names)
    uri = env.get("OMPI_MCA_orte_hnp_uri", "")
    job = uri.partition(".")[0] or env.get("PMIX_NAMESPACE", "")
    host = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    port = FIRST_PORT + zlib.crc32(job.encode()) % NUM_PORTS
    if COORDINATOR in env:
        coordinator = _address(env, COORDINATOR)
    elif local_count == count and job:
        coordinator = f"{LOOPBACK}:{port}"
    elif host:
        coordinator = f"{host[1] or f'[{host[2]}]'}:{port}"
    elif count == 1:
        coordinator = f"{LOOPBACK}:{port}"
    else:
        raise ValueError(
            f"OMPI_COMM_WORLD_SIZE={count} and nothing names the host of process 0 "
            f"(Open MPI 5 sets no OMPI_MCA_orte_hnp_uri): set {COORDINATOR}=HOST:PORT, "
            f"with mpirun -x {COORDINATOR}"
        )
    gpus = _share_of_gpus(local_index, local_count, env)
    return ProcessInfo(count, index, coordinator, "Open MPI", local_index, gpus)


def _is_slurm(env: Mapping[str, str]) -> bool:
    """Return whether this is a step of srun: a batch script alone has no such list."""
    return "SLURM_STEP_NODELIST" in env


def _from_slurm(env: Mapping[str, str]) -> ProcessInfo | None:
    if not _is_slurm(env):
        return None
    names = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID")
    _require_all(env, names, f"start with srun, or set {PROCESS_ID}")
    count, index = _count_and_index(env, *names[:2])
    hosts = expand_hosts(env["SLURM_STEP_NODELIST"])
    host = LOOPBACK if len(hosts) == 1 else hosts[0]
    step = _whole(env, "SLURM_STEP_ID") if "SLURM_STEP_ID" in env else 0
    port = FIRST_PORT + (_whole(env, "SLURM_JOB_ID") + step) % NUM_PORTS
    coordinator = f"{host}:{port}"
    if COORDINATOR in env:
        coordinator = _address(env, COORDINATOR)
    local_index = _whole(env, "SLURM_LOCALID")
    gpus = None
    if "SLURM_GPUS_PER_TASK" not in env:  # else SLURM shows each task its own
        per_node = -(-count // len(hosts))
        gpus = _share_of_gpus(local_index, max(per_node, local_index + 1), env)
    return ProcessInfo(count, index, coordinator, "SLURM", local_index, gpus)


def expand_hosts(node_list: str) -> list[str]:
    """Return the hosts of a SLURM node list, 'n[08-10,12]' as n08, n09, n10 and n12.

    Raises ValueError on a list that is none.
    """
    if not re.fullmatch(r"(?!,)(?:[^\[\],\s]|\[[\d,-]+\]|,(?=[^,]))+", node_list):
        raise ValueError(
            f"SLURM_STEP_NODELIST={node_list!r} is no list of hosts such as "
            f"n[08-10,12],gpu1: set {COORDINATOR}=HOST:PORT and start again"
        )
    hosts = []
    for word in re.findall(r"(?:[^\[\],]|\[[^\]]*\])+", node_list):
        names = [""]
        for part in re.findall(r"\[[^\]]*\]|[^\[]+", word):
            ends = _expand_numbers(part[1:-1]) if part[0] == "[" else [part]
            names = [name + end for name in names for end in ends]
        hosts += names
    return hosts


def _expand_numbers(ranges: str) -> list[str]:
    """'08-10,12' is 08, 09, 10 and 12: as wide as the first number is written."""
    numbers = []
    for word in ranges.split(","):
        first, _, last = word.partition("-")
        numbers += [
            f"{number:0{len(first)}}"
            for number in range(int(first), int(last or first) + 1)
        ]
    return numbers


def _share_of_gpus(
    local_index: int, local_count: int, env: Mapping[str, str]
) -> tuple[int, ...] | None:
    """Return one GPU for each process of a host, or an equal share of visible ones.

    A single visible GPU is this process's own: its launcher has bound it.
    """
    name = "CUDA_VISIBLE_DEVICES"
    num_visible = len(env[name].split(",")) if name in env else local_count
    if local_count == 1 or num_visible == 1:
        return None
    if num_visible % local_count:
        raise ValueError(
            f"{name}={env[name]} names {num_visible} GPUs, which {local_count} "
            "processes on this host cannot share equally: change one of the two"
        )
    share = num_visible // local_count
    return tuple(range(local_index * share, (local_index + 1) * share))


def _require_all(words: Mapping[str, str], names: tuple[str, ...], advice: str) -> None:
    here = " ".join(f"{name}={words[name]}" for name in names if name in words)
    missing = [name for name in names if name not in words]
    if missing:
        raise ValueError(f"{here} is set, {' and '.join(missing)} not: {advice}")


def _count_and_index(
    words: Mapping[str, str], count_name: str, index_name: str
) -> tuple[int, int]:
    count, index = _whole(words, count_name), _whole(words, index_name)
    if count < 1:
        raise ValueError(f"{count_name}={count} must be 1 or more: say how many run")
    if index >= count:
        raise ValueError(
            f"{index_name}={index} must be below {count_name}={count}: number the "
            "processes from 0"
        )
    return count, index


def _whole(words: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\d{1,18}", words[name], re.ASCII):
        raise ValueError(
            f"{name}={words[name]!r} must be a whole number of 0 or more: correct it"
        )
    return int(words[name])


def _address(words: Mapping[str, str], name: str) -> str:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})", words[name])
    if not found or not 0 < int(found[2]) < 65536:
        raise ValueError(
            f"{name}={words[name]!r} must be HOST:PORT, such as node1:61440: give the "
            "address of process 0"
        )
    return words[name]
