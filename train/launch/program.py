"""Begin and end a program: flags of jax, malloc, exit codes and last messages.

jax is not imported here before its flags are set. A program ends with one line for
people and, with --json, one JSON object for scripts.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator

from moejax import simulate
from moejax.config import Config
from train.launch import coordinator, failures
from train.launch.cluster import LOCAL_NUM_PROCESSES
from train.launch.processes import join
from train.launch.streams import print_leniently
from train.messages import one_line, visible

ROOT = pathlib.Path(__file__).resolve().parents[2]

DONE, CRASHED, BAD_INPUT, FAILED, PREEMPTED, INTERRUPTED = 0, 1, 2, 3, 75, 130

COMPILES_AHEAD, TRACKS = "compiles ahead", "tracks"
"""Names of the threads that compile a relayout, and of those that call a tracker. A
program does not wait for them when it ends."""

GPU_MEMORY_FRACTION = 0.92
"""Share of a GPU's memory that JAX takes at its start; NVIDIA's libraries get the rest.
Of 80 GB that is 6.4 GB, for CUDA's context, NCCL's buffers and cuDNN. JAX's own default
is 0.75."""
FRACTION_NAME = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Variable in which JAX finds the share, and a user can set another one."""

TUNABLES = ":".join(
    f"glibc.malloc.{name}"
    for name in (
        "hugetlb=1",
        "mmap_threshold=4000000000",
        "trim_threshold=8000000000",
        "arena_max=1",
    )
)
"""Settings of glibc for simulated devices, which must be there when a process starts.

XLA:CPU allocates its temporaries in each step, and glibc would map and unmap them: a
page fault for every 4 KiB of every step. With huge pages that glibc keeps, a step of
`tiny_cpu` took 0.7 of the processor time, in one run each (docs/log.md)."""


def start(cfg: Config) -> None:
    """Set the flags of jax, and join the other processes.

    Raises ValueError if the environment contradicts itself or the configuration.
    """
    set_up_backend(cfg)
    join(cfg)
    total, count = cfg.train.num_simulated_devices, coordinator.count()
    if total is None:
        return
    if total % count:
        raise ValueError(
            f"Train.num_simulated_devices={total} cannot be shared by {count} "
            f"processes: give a multiple of {count}"
        )
    if count > 1:  # XLA reads its flags when the first device is touched
        os.environ.update(simulate.environment(total // count, os.environ))
        if os.environ.get(LOCAL_NUM_PROCESSES) == str(count):
            from train.launch.compilation_cache import share_programs  # imports jax

            share_programs()


def start_of_process() -> float:
    """Return the value that time.monotonic() had when this process began.

    Without Linux's /proc it is the present value.
    """
    try:
        stat = pathlib.Path("/proc/self/stat").read_text()
    except OSError:
        return time.monotonic()
    ticks = int(stat.rpartition(")")[2].split()[19])  # field 22: ticks since the boot
    begin_sec = ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - begin_sec)


def set_up_backend(cfg: Config) -> None:
    """Set the flags of jax, as of a run of one process. Variables that the user has set
    stay as they are. jax reads some of them when it is imported."""
    variables = {
        "XLA_FLAGS": simulate.with_flags(os.environ, *simulate.COLLECTIVE_FLAGS)
    }
    if total := cfg.train.num_simulated_devices:
        variables = simulate.environment(total, os.environ)
    os.environ.update(variables)
    os.environ.setdefault(FRACTION_NAME, str(GPU_MEMORY_FRACTION))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))


def gpu_memory_fraction() -> float:
    """Return the share of a GPU's memory that a run may use: GPU_MEMORY_FRACTION, or
    what the user has set. Raises ValueError unless that is above 0 and at most 1."""
    text = os.environ.get(FRACTION_NAME, "")
    try:
        share = float(text) if text else GPU_MEMORY_FRACTION
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ValueError(
            f"{FRACTION_NAME}={text!r} must be a number above 0, at most 1"
        )
    return share


def usable_bytes(memory_bytes: int) -> int:
    """Return the bytes of a GPU with `memory_bytes` that a run may use."""
    return int(gpu_memory_fraction() * memory_bytes)


def restart_with_huge_pages() -> None:
    """Replace this process by itself with TUNABLES; return if they are set already.

    A GLIBC_TUNABLES that the user has set stays as it is.
    """
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = TUNABLES
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class RunFailed(RuntimeError):
    """Raised when a run cannot go on, and a new start by itself would not help."""


@dataclasses.dataclass
class Ending:
    """Result of a block of `guarded`."""

    code: int = DONE
    """Exit code for the error that the block raised."""


@contextlib.contextmanager
def guarded(*, as_json: bool) -> Iterator[Ending]:
    """Print the error that the block raises, and yield an object that has the exit code
    for it when the block has ended.

    ValueError and NotImplementedError are bad input (2). RunFailed and OSError, a
    failure of the machine, end with 3. Any other error is a bug: it is printed with its
    traceback (1). After 2 and 3 all processes of a run end with the same line and code.

    >>> with guarded(as_json=False) as ending:
    ...     pass
    >>> ending.code
    0
    """
    failures.report_by(lambda line, code: refuse(line, code, as_json))
    print_leniently()
    ending = Ending()
    try:
        yield ending
    except KeyboardInterrupt:
        ending.code = _leave(refuse("interrupted", INTERRUPTED, as_json))
    except (ValueError, NotImplementedError) as error:
        ending.code = _refuse_on_all(one_line(error), BAD_INPUT, as_json)
    except (RunFailed, OSError) as error:
        ending.code = _refuse_on_all(one_line(error), FAILED, as_json)
    except Exception:
        if _has_joined():
            failures.end_if_told()  # then the error is only a consequence
        traceback.print_exc()
        ending.code = _leave(CRASHED)


def _refuse_on_all(line: str, code: int, as_json: bool) -> int:
    """Print an error and return `code`; end all processes of a run with both."""
    if _has_joined():
        failures.end_all(code, line)
    return refuse(line, code, as_json)


def _leave(code: int) -> int:
    """Return `code`, or exit with it at once if this is one of several processes.

    The usual way out would wait for the others, which do not know yet that there is a
    reason to end.
    """
    if _has_joined():
        failures.exit_now(code)
    return code


def _has_joined() -> bool:
    """Return whether this is one of several processes, without an import of jax."""
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


def end(code: int) -> int:
    """Return `code`, or exit with it at once if a thread is left that Python would wait
    for.

    Such are threads of orbax after a save that failed: they wait for a folder that is
    never made (seen on a read-only disk). A thread that still compiles ahead would
    crash, because Python goes away under XLA's compiler (seen). A tracker that hangs
    may have left something for Python to wait for at its exit.
    """
    if any(_is_left(thread) for thread in threading.enumerate()):
        if _has_joined():
            sys.modules["jax"].distributed.shutdown()
        failures.exit_now(code)
    return code


def _is_left(thread: threading.Thread) -> bool:
    """Return whether Python would wait for a thread, or crash under it."""
    if thread is threading.main_thread():
        return False
    return not thread.daemon or thread.name in (COMPILES_AHEAD, TRACKS)


def refuse(error: Exception | str, code: int, as_json: bool) -> int:
    """Print an error in one line, and return `code`."""
    line = one_line(error)
    print(f"error: {line}", file=sys.stderr, flush=True)
    emit({"error": line, "exit_code": code}, as_json)
    return code


def emit(record: dict, as_json: bool) -> None:
    """With `as_json`, print a record as one JSON object, the last line, for scripts."""
    if as_json:
        print(json.dumps(record), flush=True)


def say_loudly(line: str) -> None:
    """Print a line to stderr at once."""
    print(visible(line), file=sys.stderr, flush=True)
