"""Exchange short texts between the processes of a run, through JAX's coordinator.

The coordinator is a server in process 0 with a store of keys and texts. It works before
any device is touched, and while steps run on the devices. JAX has no public function
for it (`jax._src.distributed`, jax 0.11); only this module uses the private one.
"""

from typing import Any

PREFIX = "moejax/"
WEEK_MSEC = 7 * 24 * 3600 * 1000
"""Limit on waiting for a text. It is long because heartbeats end a process whose peer
has died, and the watchdog one that waits for more than Processes.watchdog_sec."""


def put(key: str, text: str) -> None:
    """Store a text under a key. Raises an error of jax if the key is taken."""
    client().key_value_set(PREFIX + key, text)


def wait_for(key: str, limit_msec: int = WEEK_MSEC) -> str:
    """Return the text under a key, once a process has stored it. Raises an error of jax
    after `limit_msec`."""
    return client().blocking_key_value_get(PREFIX + key, limit_msec)


def find(folder: str) -> dict[str, str]:
    """Return the texts whose keys begin with `folder`/, by the rest of the key."""
    begin = f"{PREFIX}{folder}/"
    pairs = client().key_value_dir_get(begin)
    return {key.removeprefix(begin): text for key, text in pairs}


def delete(key: str) -> None:
    """Delete the text under a key."""
    client().key_value_delete(PREFIX + key)


def is_here() -> bool:
    """Return whether this process has joined a run of several."""
    return client() is not None


def own_index() -> int:
    """Return the number of this process; 0 in a run of one."""
    from jax._src.distributed import global_state

    return global_state.process_id


def count() -> int:
    """Return the number of processes of the run."""
    from jax._src.distributed import global_state

    return global_state.num_processes


def client() -> Any:
    """Return jax's client of the coordinator; None in a run of one process."""
    from jax._src.distributed import global_state

    return global_state.client
