"""Find out which process of a run this one is, from flags or the environment.

    sources, in this order        count, index                  coordinator
    flags                         --num_processes, --process_id --coordinator
    MOEJAX_*                      MOEJAX_NUM_PROCESSES, .._ID   MOEJAX_COORDINATOR
    Kubernetes, with the first    .., JOB_COMPLETION_INDEX      MOEJAX_COORDINATOR
    Open MPI                      OMPI_COMM_WORLD_SIZE, .._RANK host of mpirun
    SLURM, in a step of srun      SLURM_NTASKS, SLURM_PROCID    first host of the step

MOEJAX_COORDINATOR by itself replaces the coordinator of the last two sources. Open MPI
comes before SLURM, because mpirun within a SLURM job starts one daemon per host with
srun, and SLURM's variables count the daemons. Where all processes are on one host, the
coordinator is 127.0.0.1. This module does not import jax.
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
"""Variable with the number of earlier starts of this run; 0 where it is not set."""

LOOPBACK = "127.0.0.1"
FIRST_PORT, NUM_PORTS = 61440, 4096
"""Ports of coordinators. They are above those that Linux gives to outgoing connections
(32768 to 60999)."""


@dataclasses.dataclass(frozen=True)
class Flags:
    """Command-line arguments that name a process: all three are set, or none."""

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


@dataclasses.dataclass(frozen=True)
class ProcessInfo:
    """The place of a process in a run of several."""

    count: int
    """Number of processes of the run, at least 2."""
    index: int
    """Number of this process: 0 to count - 1."""
    coordinator: str
    """Address of process 0, as HOST:PORT."""
    source: str
    """Source of these facts: 'flags', 'MOEJAX', 'Kubernetes', 'Open MPI' or 'SLURM'."""
    local_index: int | None = None
    """Number of this process among those of its host; None where it is not known."""
    local_device_ids: tuple[int, ...] | None = None
    """Positions of this process's GPUs among those that it sees; None: it takes all."""


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
    """Return the arguments that `add_flags` has added."""
    return Flags(args.coordinator, args.num_processes, args.process_id)


def detect(
    environ: Mapping[str, str], flags: Flags | None = None
) -> ProcessInfo | None:
    """Return the place of this process in its run; None for a run of one process.

    Raises ValueError, in one line, where flags or variables are incomplete or
    contradict one another.
    """
    env = {name: text.strip() for name, text in environ.items() if text.strip()}
    process = _from_flags(flags)
    for source in (_from_moejax, _from_open_mpi, _from_slurm):
        process = process or source(env)
    return process if process is not None and process.count > 1 else None


def is_loopback(coordinator: str) -> bool:
    """Return whether HOST or HOST:PORT is a loopback address, which only this machine
    can reach."""
    host = coordinator
    if coordinator.startswith("["):
        host = coordinator[1:].partition("]")[0]
    elif coordinator.count(":") == 1:  # a bare IPv6 address has more
        host = coordinator.partition(":")[0]
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d+){3}", host))


def _from_flags(flags: Flags | None) -> ProcessInfo | None:
    """Return the place that the flags give; None where there are none."""
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


def _from_moejax(env: Mapping[str, str]) -> ProcessInfo | None:
    """Return the place that MOEJAX_* variables give, with or without the index of
    Kubernetes; None where there are none, or where MOEJAX_COORDINATOR only replaces the
    coordinator of another launcher."""
    variables = [x for x in (COORDINATOR, NUM_PROCESSES, PROCESS_ID) if x in env]
    if not variables:
        return None
    has_launcher = _is_open_mpi(env) or _is_slurm(env)
    if variables == [COORDINATOR] and has_launcher and COMPLETION_INDEX not in env:
        return None
    index_name = PROCESS_ID
    if PROCESS_ID not in env and COMPLETION_INDEX in env:
        index_name = COMPLETION_INDEX
    names = (COORDINATOR, NUM_PROCESSES, index_name)
    _require_all(env, names, "set all three, or none")
    count, index = _count_and_index(env, NUM_PROCESSES, index_name)
    coordinator = _address(env, COORDINATOR)
    source = "Kubernetes" if index_name == COMPLETION_INDEX else "MOEJAX"
    names = (LOCAL_NUM_PROCESSES, LOCAL_PROCESS_ID)
    if not any(name in env for name in names):
        return ProcessInfo(count, index, coordinator, source)
    _require_all(env, names, "set both, or none")
    local_count, local_index = _count_and_index(env, *names)
    gpus = _share_of_gpus(local_index, local_count, env)
    return ProcessInfo(count, index, coordinator, source, local_index, gpus)


def _is_open_mpi(env: Mapping[str, str]) -> bool:
    """Return whether mpirun of Open MPI has started this process."""
    return "OMPI_COMM_WORLD_SIZE" in env or "OMPI_COMM_WORLD_RANK" in env


def _from_open_mpi(env: Mapping[str, str]) -> ProcessInfo | None:
    """Return the place that Open MPI gives; None where it has not started this process.

    Open MPI 4 names the host of mpirun. Open MPI 5 does not, so that a run on several
    hosts needs MOEJAX_COORDINATOR there.
    """
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
    """Return whether srun has started this process. A batch script by itself has no
    list of the step's nodes."""
    return "SLURM_STEP_NODELIST" in env


def _from_slurm(env: Mapping[str, str]) -> ProcessInfo | None:
    """Return the place that srun gives; None where it has not started this process."""
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
    """Return the hosts of a SLURM node list: 'n[08-10,12]' is n08, n09, n10 and n12.

    Raises ValueError for a text that is not such a list.
    """
    if not re.fullmatch(r"(?!,)(?:[^\[\],\s]|\[[\d,-]+\]|,(?=[^,]))+", node_list):
        raise ValueError(
            f"SLURM_STEP_NODELIST={node_list!r} is not a list of hosts such as "
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
    """Return the numbers of '08-10,12', which are 08, 09, 10 and 12. Each has as many
    digits as the first number of its range."""
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
    """Return the positions of this process's GPUs: an equal share of the visible ones,
    or one GPU where CUDA_VISIBLE_DEVICES is not set.

    Return None where the process takes all that it sees: it is alone on its host, or
    its launcher lets it see a single GPU. Raises ValueError where the shares are not
    equal.
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
    """Raise ValueError with advice unless `words` has all of the names."""
    here = " ".join(f"{name}={words[name]}" for name in names if name in words)
    missing = [name for name in names if name not in words]
    if missing:
        missing = " and ".join(missing)
        raise ValueError(f"{here} is set, but not {missing}: {advice}")


def _count_and_index(
    words: Mapping[str, str], count_name: str, index_name: str
) -> tuple[int, int]:
    """Return the number of processes and the number of this one; raise ValueError where
    they cannot be that."""
    count, index = _whole(words, count_name), _whole(words, index_name)
    if count < 1:
        raise ValueError(
            f"{count_name}={count} must be 1 or more: give the number of processes"
        )
    if index >= count:
        raise ValueError(
            f"{index_name}={index} must be below {count_name}={count}: number the "
            "processes from 0"
        )
    return count, index


def _whole(words: Mapping[str, str], name: str) -> int:
    """Parse a word as a whole number of 0 or more; raise ValueError for others."""
    if not re.fullmatch(r"\d{1,18}", words[name], re.ASCII):
        raise ValueError(
            f"{name}={words[name]!r} must be a whole number of 0 or more: correct it"
        )
    return int(words[name])


def _address(words: Mapping[str, str], name: str) -> str:
    """Return a word that is HOST:PORT; raise ValueError for another one."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})", words[name])
    if not match or not 0 < int(match[2]) < 65536:
        raise ValueError(
            f"{name}={words[name]!r} must be HOST:PORT, such as node1:61440: give the "
            "address of process 0"
        )
    return words[name]
