"""JAX's cache of compiled programs, with a checksum of key and content in each entry.

JAX runs what it finds under a program's key. The file of another program, or a damaged
one, crashes the process or computes something else. Here such an entry is removed and
the program is compiled again, and a folder that cannot be read or written costs time
only. Entries are in <JAX_COMPILATION_CACHE_DIR>/checked, so programs that use JAX's own
cache may share the folder.

Processes with simulated devices share their programs: process 0 compiles, or finds a
program in its cache, and the others get it from there. Eight processes on two cores
would otherwise take turns to compile the same. Their first step took 160 s so, and 62 s
with shared programs.

This module alone uses the private cache of jax (0.11).
"""

import functools
import hashlib
import pathlib
import platform
from collections.abc import Callable

import jax
from jax._src import cache_key, compilation_cache
from jax._src.compilation_cache_interface import CacheInterface
from jax._src.lru_cache import LRUCache

from train.files import write_whole
from train.launch import coordinator

FOLDER = "checked"
SUFFIX = "-cache"
"""Suffix that LRUCache gives to the file of a key."""
DIGEST_BYTES = 32
CPU_KEY = "cpu"
"""Name under which process 0 tells the others the fingerprint of its CPU."""


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


class SharedCache(CacheInterface):
    """The cache of process 0, for all processes of a run.

    jax lets the others wait for what process 0 has compiled, and not for what it has
    found in its cache. So what it finds is passed on here.
    """

    def __init__(self, own: CacheInterface) -> None:
        self._own = own

    def get(self, key: str) -> bytes | None:
        """Return the content under a key; None where it is to be compiled, or comes
        from process 0."""
        if coordinator.own_index() != 0:
            return None
        content = self._own.get(key)
        if content is not None:
            whole = compilation_cache.decompress_executable(content)
            program, _ = compilation_cache.extract_executable_and_time(whole)
            packed = compilation_cache.compress_executable(program)
            coordinator.client().key_value_set_bytes(key, packed, True)
        return content

    def put(self, key: str, value: bytes) -> None:
        """Store a content under a key."""
        self._own.put(key, value)


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


def share_programs(limit_sec: float) -> None:
    """Let process 0 compile for all processes of a run on CPUs, before any compiles.

    jax can do so, but a part of its key, the fingerprint of the devices, differs by
    process there: the others would wait for a program that never comes. So all take
    a fingerprint of process 0's CPU instead. Its kind of CPU is presumed to be that of
    all. They wait `limit_sec` for it at most.
    """
    if coordinator.own_index() == 0:
        coordinator.put(CPU_KEY, _fingerprint_of_cpu())
    cpu = coordinator.wait_for(CPU_KEY, round(1e3 * limit_sec)).encode()
    cache_key._hash_accelerator_config = lambda hasher, devices: hasher.update(cpu)
    jax.config.update("jax_share_binary_between_hosts", True)
    own = compilation_cache.get_file_cache

    def get_file_cache(path: str) -> tuple[CacheInterface, str] | None:
        cache = own(path)
        return None if cache is None else (SharedCache(cache[0]), cache[1])

    compilation_cache.get_file_cache = get_file_cache


def _fingerprint_of_cpu() -> str:
    """Return a digest of what this machine's CPU can do, as far as Linux says it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    known = {line for line in lines if line.startswith(("model name", "flags"))}
    text = "\n".join([platform.machine(), *sorted(known)])
    return hashlib.sha256(text.encode()).hexdigest()


def _digest(key: str, content: bytes | memoryview) -> bytes:
    """Return the sha256 of a key and a content."""
    sha256 = hashlib.sha256(key.encode() + b"\0")
    sha256.update(content)
    return sha256.digest()
