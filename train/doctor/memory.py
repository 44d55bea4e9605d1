"""Remember on this machine what was found right, so that it is not checked again.

    <JAX_COMPILATION_CACHE_DIR>/doctor/<digest>.json

The digest is of all that decides the result: source, libraries, flags, kinds of
devices, mesh, layout and sizes of the model, and the names of the checks. A file that
cannot be read or written costs the checks once more.
"""

import datetime
import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence

import jax

from moejax.resolve.resolved import Resolved
from train.files import write_whole
from train.launch.agreement import device_facts, program_facts

FOLDER = "doctor"


def fingerprint(run: Resolved, names: Sequence[str]) -> str:
    """Return the digest of the checks with these names, on the devices of a run."""
    facts, cfg = program_facts() | device_facts(), run.cfg
    sizes = run.mesh.shape, run.layout, cfg.network
    text = json.dumps([facts, repr(sizes), list(names)])
    return hashlib.sha256(text.encode()).hexdigest()


def is_remembered(digest: str, say: Callable[[str], None]) -> bool:
    """Return whether this machine remembers that the checks of a digest were right.
    `say` gets a line about a file that cannot be read."""
    path = _path(digest)
    if path is None:
        return False
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["digest"] == digest:
            return True
        problem = "it is of other checks"
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError) as fault:
        problem = repr(fault)
    say(f"DOCTOR'S MEMORY NOT READ: {path}: {problem}: the devices are checked again")
    return False


def remember(digest: str, say: Callable[[str], None]) -> None:
    """Remember that the checks of a digest were right. `say` gets a line about a file
    that cannot be written."""
    path = _path(digest)
    if path is None:
        return
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"digest": digest, "when": now}) + "\n"
        write_whole(path, text, is_shared=True)
    except OSError as fault:
        say(f"DOCTOR'S MEMORY NOT WRITTEN: {fault}: the next start checks again")


def _path(digest: str) -> pathlib.Path | None:
    """Return the file of a digest; None where the cache is in a bucket (gs://..) or
    there is none."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or "://" in folder:
        return None
    return pathlib.Path(folder) / FOLDER / f"{digest[:16]}.json"
