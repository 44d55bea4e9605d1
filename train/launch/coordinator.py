"""Exchange short texts between the processes of a run, through JAX's coordinator.

The coordinator is a server in process 0 with a store of keys and texts. It works before
any device is touched, and while steps run on the devices. JAX has no public function
for it (`jax._src.distributed`, jax 0.11); only this module reads the private one.
"""

import importlib

PREFIX = "moejax/"
WEEK_MSEC = 7 * 24 * 3600 * 1000
"""Limit on waiting for a text. It is long because heartbeats end a process whose peer
has died, and the watchdog one that waits for more than Processes.watchdog_sec."""
MAX_CANCELLED = 10
"""Number of times that a request is made again because it was cancelled."""
LOST = "CANCELLED", "ping timeout"
"""Words in the error of a request whose answer was lost while this process, or the
coordinator's, was stopped."""


def put(key: str, text: str) -> None:
    """Store a text under a key. Raises an error of jax if the key is taken."""
    _state().client.key_value_set(PREFIX + key, text)


def wait_for(key: str) -> str:
    """Return the text under a key, once a process has stored it.

    The system may stop a process for a while, as a shell does with Ctrl-Z. Where that
    ends the request, it is made again.
    """
    for _ in range(MAX_CANCELLED):
        try:
            return _ask(key)
        except RuntimeError as fault:  # jax's errors are RuntimeErrors
            if not any(word in str(fault) for word in LOST):
                raise
    return _ask(key)


def _ask(key: str) -> str:
    return _state().client.blocking_key_value_get(PREFIX + key, WEEK_MSEC)


def delete(key: str) -> None:
    """Delete the text under a key."""
    _state().client.key_value_delete(PREFIX + key)


def meet(name: str, limit_sec: float) -> None:
    """Return when all processes have called this. Raises an error of jax after the
    limit."""
    _state().client.wait_at_barrier(PREFIX + name, round(1000 * limit_sec))


def is_here() -> bool:
    """Return whether this process has joined a run of several."""
    return _state().client is not None


def own_index() -> int:
    """Return the number of this process; 0 in a run of one."""
    return _state().process_id


def count() -> int:
    """Return the number of processes of the run."""
    return _state().num_processes


def _state():
    """Return JAX's record of this process and its coordinator.

    Not by an import statement: while orbax imports its modules, etils replaces
    `builtins.__import__`, and a statement that another thread executes meanwhile
    breaks. Not at the top of this file: jax reads its flags when it is imported.
    """
    return importlib.import_module("jax._src.distributed").global_state
