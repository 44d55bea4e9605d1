"""JAX's cache of compiled programs, with a checksum of key and content in each entry.

JAX runs what it finds under a program's key. The file of another program, or a damaged
one, crashes the process or computes something else. Here such an entry is removed and
the program is compiled again, and a folder that cannot be read or written costs time
only. Entries are in <JAX_COMPILATION_CACHE_DIR>/checked, so programs that use JAX's own
cache may share the folder.

This module alone uses the private cache of jax (0.11).
"""

import functools
import hashlib
import pathlib
from collections.abc import Callable

from jax._src import compilation_cache
from jax._src.compilation_cache_interface import CacheInterface
from jax._src.lru_cache import LRUCache

from train.files import write_whole

FOLDER = "checked"
SUFFIX = "-cache"
"""Suffix that LRUCache gives to the file of a key."""
DIGEST_BYTES = 32


class CheckedCache(CacheInterface):
    """A cache whose files begin with the sha256 of key and content."""

    def __init__(self, folder: pathlib.Path, say: Callable[[str], None]) -> None:
        """Open the cache of a folder, which is made if missing. Raises OSError."""
        max_bytes = compilation_cache.config.compilation_cache_max_size.value
        self._path, self._say = folder, say
        self._files = LRUCache(str(folder), max_size=max_bytes)
        self._is_failing = False

    def get(self, key: str) -> bytes | None:
        """Return the content under a key; None without one, or if it is damaged."""
        try:
            entry = self._files.get(key)
            if entry is None:
                return None
            content = memoryview(entry)[DIGEST_BYTES:]
            if _digest(key, content) == entry[:DIGEST_BYTES]:
                return bytes(content)
            path = self._path / f"{key}{SUFFIX}"
            self._say(
                f"COMPILATION CACHE DAMAGED: {path} is not the program of its key; it "
                "is removed, and the program is compiled again"
            )
            path.unlink(missing_ok=True)
        except OSError as fault:
            self._lose(fault)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Store a content under a key, in one atomic operation."""
        entry = _digest(key, value) + value
        try:
            if self._files.eviction_enabled:
                self._files.put(key, entry)
            else:
                path = self._path / f"{key}{SUFFIX}"
                write_whole(path, entry, is_shared=True)
        except OSError as fault:
            self._lose(fault)

    def _lose(self, fault: OSError) -> None:
        """Warn the user of the first operation that failed."""
        if not self._is_failing:
            self._say(
                f"COMPILATION CACHE NOT USED: {fault}: the run goes on, and the next "
                "one compiles the same programs again"
            )
        self._is_failing = True


@functools.cache
def check_entries(say: Callable[[str], None]) -> None:
    """Let jax use a CheckedCache when it first compiles in this process; `say` gets a
    line about an entry that is damaged.

    Entries in a bucket (gs://..) are left to jax, unchecked.
    """
    unchecked = compilation_cache.get_file_cache

    def get_file_cache(path: str) -> tuple[CacheInterface, str] | None:
        if "://" in path:
            say(f"the entries of the compilation cache in {path} are not checked")
            return unchecked(path)
        folder = pathlib.Path(path) / FOLDER
        try:
            return CheckedCache(folder, say), str(folder)
        except OSError as fault:
            say(f"COMPILATION CACHE NOT USED: {fault}: every start compiles")
            return None

    compilation_cache.get_file_cache = get_file_cache


def _digest(key: str, content: bytes | memoryview) -> bytes:
    """Return the sha256 of a key and a content."""
    sha256 = hashlib.sha256(key.encode() + b"\0")
    sha256.update(content)
    return sha256.digest()
