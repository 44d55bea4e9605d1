"""Readers that do what no reader may, to test that tests.support.mutation_run sees
it."""

import os
import pathlib
import pickle
import resource
import subprocess
import sys
import time

import numpy as np

from tests.support.mutated_formats import Format
from tests.support.mutations import flip_bits


def build(folder: pathlib.Path, variant: int) -> None:
    """Write a file of 100 bytes."""
    (folder / "a.bin").write_bytes(bytes(100))


def is_damaged(folder: pathlib.Path) -> bool:
    """Return whether the file in the folder is not what `build` wrote."""
    return any((folder / "a.bin").read_bytes())


def fail(folder: pathlib.Path) -> None:
    raise KeyError("an error that is a bug")


def fail_silently(folder: pathlib.Path) -> None:
    raise ValueError("it is damaged")


def say_at_length(folder: pathlib.Path) -> None:
    print("x" * 2000)


def colour(folder: pathlib.Path) -> None:
    print("\x1b[31mred")


def hang(folder: pathlib.Path) -> None:
    time.sleep(60)


def allocate(folder: pathlib.Path) -> None:
    """Hold more than LIMIT_MIB: memory counts from when each page has been written."""
    array = np.empty(300 * 2**20, np.uint8)
    array[:: resource.getpagesize()] = 1


def write_outside(folder: pathlib.Path) -> None:
    (folder.parent.parent / "outside").write_text("")


def rename_outside(folder: pathlib.Path) -> None:
    (folder / "a.bin").rename(folder.parent.parent / "b.bin")


def link_outside(folder: pathlib.Path) -> None:
    (folder.parent.parent / "link").symlink_to(folder / "a.bin")


def catch_all(folder: pathlib.Path) -> None:
    """Catch the alarm too, and return late."""
    try:
        while True:
            pass
    except BaseException:
        end_sec = time.process_time() + 0.1
        while time.process_time() < end_sec:
            pass


def unpickle(folder: pathlib.Path) -> None:
    pickle.loads(pickle.dumps(pathlib.PurePosixPath("x")))


def execute(folder: pathlib.Path) -> None:
    exec("1 + 1")


def start_program(folder: pathlib.Path) -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


def crash(folder: pathlib.Path) -> None:
    os.abort()


FAULTS = {
    fail: "a traceback, exit code 1",
    fail_silently: "the error names none of a.bin",
    say_at_length: "a line that is too long",
    colour: "control characters in a line",
    hang: "longer than 1 s",
    catch_all: "longer than 1 s, and it caught the alarm",
    allocate: "more memory than twice the file",
    write_outside: "not allowed: open",
    rename_outside: "not allowed: os.rename",
    link_outside: "not allowed: os.symlink",
    unpickle: "not allowed: pickle.find_class",
    execute: "not allowed: exec",
    start_program: "not allowed: subprocess.Popen",
    crash: "exit code -6",
}
"""Readers, and what is said of each."""


def _format(reader) -> Format:
    def read(folder: pathlib.Path) -> None:
        if is_damaged(folder):
            reader(folder)

    # A loaded machine may take seconds to give a process its memory.
    limit_sec = 1 if "longer than" in FAULTS[reader] else 30
    return Format(
        "a.bin", build, read, (flip_bits,), 2, ("a.bin",), limit_sec=limit_sec
    )


FAULTY = {reader.__name__: _format(reader) for reader in FAULTS}
"""Formats with these readers, by the reader's name."""
