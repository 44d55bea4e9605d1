"""How a program ends: exit codes, one line for people, one JSON object for scripts."""

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable

DONE, CRASHED, BAD_INPUT, FAILED, PREEMPTED, INTERRUPTED = 0, 1, 2, 3, 75, 130
COMPILES_AHEAD = "compiles ahead"
"""Name of a thread that is left to itself when its program ends."""


def guarded(work: Callable[[], int], *, as_json: bool) -> int:
    """work()'s exit code, or that of the error that it raises, which is told.

    ValueError and NotImplementedError are bad input, an OSError is a failure of the
    machine, and any other error, with its traceback, is ours.
    """
    try:
        return work()
    except KeyboardInterrupt:
        code = refuse("interrupted", INTERRUPTED, as_json)
    except (ValueError, NotImplementedError) as error:
        code = refuse(error, BAD_INPUT, as_json)
    except OSError as error:
        code = refuse(error, FAILED, as_json)
    except Exception:
        traceback.print_exc()
        code = CRASHED
    return leave(code)


def leave(code: int) -> int:
    """`code`; but where this is one of several processes, it ends here and now.

    The usual way out would wait for the others (Processes.shutdown_sec), who do not
    know yet that there is a reason to end.
    """
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def end(code: int) -> int:
    """`code`; but while a thread still compiles ahead, this process ends here and now:
    on the usual way out XLA's compiler loses its Python, and crashes (seen)."""
    if any(thread.name == COMPILES_AHEAD for thread in threading.enumerate()):
        import jax

        if jax.distributed.is_initialized():
            jax.distributed.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def refuse(error: Exception | str, code: int, as_json: bool) -> int:
    """`code`, when the error has been told."""
    line = one_line(error)
    print(f"error: {line}", file=sys.stderr, flush=True)
    emit({"error": line, "exit_code": code}, as_json)
    return code


def emit(record: dict, as_json: bool) -> None:
    """One JSON object as the last line, for scripts."""
    if as_json:
        print(json.dumps(record), flush=True)


def one_line(error: Exception | str) -> str:
    return " ".join(str(error).split())
