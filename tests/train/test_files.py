"""Test that files are written whole and synced, and that errors name them."""

import errno
import os
import stat

import pytest

from train import files
from train.files import write_whole


def test_the_file_and_its_folder_are_synced_around_the_rename(tmp_path, monkeypatch):
    events, path = [], tmp_path / "a.json"
    fsync, replace = os.fsync, type(path).replace

    def note_sync(descriptor):
        events.append(f"sync {os.readlink(f'/proc/self/fd/{descriptor}')}")
        fsync(descriptor)

    def note_replace(source, target):
        events.append("rename")
        return replace(source, target)

    monkeypatch.setattr(files.os, "fsync", note_sync)
    monkeypatch.setattr(type(path), "replace", note_replace)
    write_whole(path, "é")
    assert events == [f"sync {path}.tmp", "rename", f"sync {tmp_path}"]
    assert path.read_text(encoding="utf-8") == "é"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("error", "match"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"device: '.*a.json'"),
        (FileNotFoundError(errno.ENOENT, "Gone", "other"), "'other'"),
        (KeyboardInterrupt(), "^$"),
    ],
)
def test_a_write_that_fails_names_its_file_and_leaves_the_old_one(
    tmp_path, monkeypatch, error, match
):
    """An error that names a file keeps its name."""
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def fail(descriptor):
        raise error

    monkeypatch.setattr(files.os, "fsync", fail)
    for is_shared in (False, True):
        with pytest.raises(type(error), match=match):
            write_whole(path, "new", is_shared=is_shared)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_a_shared_file_do_not_meet(tmp_path, monkeypatch):
    """The second writes while the bytes of the first are not yet on the disk."""
    path, fsync = tmp_path / "a.json", os.fsync

    def write_another(descriptor):
        monkeypatch.setattr(files.os, "fsync", fsync)
        write_whole(path, b"second", is_shared=True)
        (partial,) = (x.name for x in tmp_path.iterdir() if x != path)
        assert f".{os.getpid()}-" in partial
        fsync(descriptor)

    monkeypatch.setattr(files.os, "fsync", write_another)
    write_whole(path, b"first", is_shared=True)
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_system_that_cannot_sync_folders_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "a").touch()
    faults = {"folder": errno.EINVAL, "file": errno.EIO}

    def fsync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if kind == ("folder" if is_folder else "file"):
            raise OSError(faults[kind], "refused")

    monkeypatch.setattr(os, "fsync", fsync)
    kind = "folder"
    for number in files.NO_SYNC_OF_FOLDERS:
        faults["folder"] = number
        files.sync_tree(tmp_path)
    kind = "file"
    with pytest.raises(OSError, match="refused"):
        files.sync_tree(tmp_path)
