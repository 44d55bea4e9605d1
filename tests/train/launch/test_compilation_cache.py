"""Test that the cache of compiled programs gives a program for its own key only, and
that a cache that cannot be used costs time and not the run."""

import os

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache as cache_of_jax

from train.launch import compilation_cache
from train.launch.compilation_cache import CheckedCache


@pytest.fixture
def messages():
    return []


@pytest.fixture
def cache(tmp_path, messages):
    return CheckedCache(tmp_path / "checked", messages.append)


def path_of(cache, key):
    return cache._path / f"{key}-cache"


def test_the_private_interface_is_that_of_this_version():
    """A new version of jax needs a look at its compilation_cache.py and lru_cache.py:
    get_file_cache, _initialize_cache and LRUCache."""
    assert jax.__version__.rpartition(".")[0] == "0.11"


def test_an_entry_comes_back(cache, messages):
    cache.put("a", b"program")
    assert cache.get("a") == b"program"
    assert cache.get("b") is None
    assert messages == []
    assert [path.name for path in cache._path.iterdir()] == ["a-cache"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda path, other: path.write_bytes(other.read_bytes()),
        lambda path, other: path.write_bytes(path.read_bytes()[:-1]),
        lambda path, other: path.write_bytes(path.read_bytes()[:7]),
        lambda path, other: path.write_bytes(b""),
        lambda path, other: path.write_bytes(path.read_bytes() + b"x"),
        lambda path, other: path.write_bytes(path.read_bytes()[32:]),
        lambda path, other: path.write_bytes(b"\xff" + path.read_bytes()[1:]),
        lambda path, other: other.rename(path),
    ],
    ids=["copied", "cut", "short", "empty", "longer", "plain", "flipped", "moved"],
)
def test_a_damaged_entry_is_said_removed_and_stored_again(cache, messages, damage):
    cache.put("a", b"program a")
    cache.put("b", b"program b")
    path = path_of(cache, "a")
    damage(path, path_of(cache, "b"))
    assert cache.get("a") is None
    (message,) = messages
    assert str(path) in message
    assert not path.exists()
    cache.put("a", b"program a")
    assert cache.get("a") == b"program a"


def test_a_folder_that_cannot_be_written_costs_time_only(cache, messages, monkeypatch):
    """Root may write anywhere, so a name that is too long stands for a read-only
    folder; a full disk is an error of the write."""
    cache.put("k" * 300, b"program")
    assert cache.get("k" * 300) is None
    assert len(messages) == 1
    assert "COMPILATION CACHE NOT USED" in messages[0]

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    full = CheckedCache(cache._path, messages.append)
    monkeypatch.setattr(os, "fsync", fail)
    full.put("a", b"program")
    full.put("b", b"program")
    assert len(messages) == 2
    assert "No space left on device: '" in messages[1]
    assert list(cache._path.iterdir()) == []


@pytest.fixture
def jax_with_cache(tmp_path, messages, monkeypatch):
    """Let jax compile with a checked cache in tmp_path, and as before afterwards."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path / "cache"),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    monkeypatch.setattr(
        cache_of_jax, "get_file_cache", cache_of_jax.get_file_cache
    )  # restored at the end
    compilation_cache.check_entries.__wrapped__(messages.append)
    for name, value in settings.items():
        jax.config.update(name, value)
    cache_of_jax.reset_cache()
    yield tmp_path / "cache" / "checked"
    for name, value in before.items():
        jax.config.update(name, value)
    cache_of_jax.reset_cache()


def test_swapped_programs_compute_what_was_asked(jax_with_cache, messages):
    """Each file is under the key of another program: jax would run the other one."""

    def results():
        jax.clear_caches()
        x = jnp.arange(4.0)
        return [float(jax.jit(lambda x, k=k: (x * k).sum())(x)) for k in (2.0, 3.0)]

    expected = results()
    files = sorted(jax_with_cache.glob("*-cache"))
    contents = [file.read_bytes() for file in files]
    assert len(files) >= 2
    for file, content in zip(files, contents[1:] + contents[:1]):
        file.write_bytes(content)
    assert results() == expected
    assert len(messages) == len(files)
    messages.clear()
    assert results() == expected  # they were stored again
    assert messages == []
    assert len(sorted(jax_with_cache.glob("*-cache"))) == len(files)


class FakeClient:
    """What jax knows of the coordinator's store of bytes."""

    def __init__(self) -> None:
        self.values = {}

    def key_value_set_bytes(self, key, value, may_overwrite):
        assert may_overwrite, "a program may be compiled twice in a process"
        self.values[key] = value


def test_process_0_passes_on_what_it_finds_and_the_others_wait(
    jax_with_cache, monkeypatch
):
    """jax waits for a program under its key, without the time that its cache puts in
    front of it."""
    jax.clear_caches()
    jax.jit(lambda x: x * 41)(1.0)
    (path,) = jax_with_cache.glob("*-cache")
    key, client = path.name.removesuffix("-cache"), FakeClient()
    cache = compilation_cache.SharedCache(CheckedCache(jax_with_cache, print))
    monkeypatch.setattr(compilation_cache.coordinator, "client", lambda: client)
    content = cache.get(key)
    program, _ = cache_of_jax.extract_executable_and_time(
        cache_of_jax.decompress_executable(content)
    )
    assert list(client.values) == [key]
    assert cache_of_jax.decompress_executable(client.values[key]) == program
    assert cache.get("other") is None
    assert list(client.values) == [key]
    monkeypatch.setattr(compilation_cache.coordinator, "own_index", lambda: 3)
    assert cache.get(key) is None


def test_a_cache_that_is_a_file(jax_with_cache, messages):
    os.makedirs(jax_with_cache.parent)
    jax_with_cache.write_text("in the way")
    jax.clear_caches()
    assert float(jax.jit(lambda x: x + 41)(1.0)) == 42
    assert "every start compiles" in messages[0]
