"""Test that files are written whole and synced, and that errors name them."""

import errno
import os

import pytest

from train.launch import files
from train.launch.files import path_named, write_whole


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


def test_an_error_of_a_write_names_the_file_and_leaves_the_old_one(
    tmp_path, monkeypatch
):
    path = tmp_path / "a.json"
    write_whole(path, "old")

    def fail(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: '.*a.json'"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_that_names_a_file_keeps_its_name(tmp_path):
    with (
        pytest.raises(FileNotFoundError, match=r"'.*none'"),
        path_named("other"),
    ):
        (tmp_path / "none").open()
