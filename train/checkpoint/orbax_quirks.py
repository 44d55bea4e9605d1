"""Clean up after failed orbax calls: unfinished files, pages of log, long errors."""

import functools
import logging
import pathlib
import shutil
import sys
import time

UNFINISHED = ".orbax-checkpoint-tmp"
"""Orbax writes a step under its name with this suffix, and renames it when complete."""


def remove_unfinished(directory: pathlib.Path) -> None:
    """Remove the files of unfinished saves; call it while no save is in flight.

    After each removal it looks again, for two seconds at most: the other writers of a
    failed save end later, and create their files again.
    """
    for _ in range(40):
        remains = list(directory.glob(f"*{UNFINISHED}*"))
        if not remains:
            return
        for path in remains:
            if path.is_symlink() or path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.05)


def shorten(error: Exception) -> str:
    """Return an error's type and its message in one line, cut to about 200 characters.

    The beginning of a message tells what was done, and its end why that failed, so the
    paths in the middle are cut out. The source lines that tensorstore appends in
    brackets are removed too.
    """
    text = " ".join(str(error).split(" [")[0].split())
    if len(text) > 200:
        text = f"{text[:80]} ... {text[-110:]}"
    return f"{type(error).__name__}: {text}"


@functools.cache
def quiet_orbax() -> None:
    """Suppress the output of orbax about errors that it also raises.

    For a failed save that is pages of log and a traceback for each error. It also
    prints, through the interpreter's hook, a traceback for each task that ended with
    the event loop of a failed call. Output of other libraries is kept.
    """

    def is_not_of_orbax(record: logging.LogRecord) -> bool:
        return "/orbax/checkpoint/" not in record.pathname

    def names_no_orbax(record: logging.LogRecord) -> bool:
        # asyncio logs each task whose error nobody retrieved. The code that it ran or
        # the file that it wrote belongs to orbax.
        return "orbax" not in logging.Formatter().format(record)

    def hook(unraisable) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        of_orbax = code is not None and "/orbax/checkpoint/" in code.co_filename
        if not of_orbax and str(unraisable.exc_value) != "Event loop is closed":
            hook_before(unraisable)

    logging.getLogger("absl").addFilter(is_not_of_orbax)
    logging.getLogger("asyncio").addFilter(names_no_orbax)
    hook_before, sys.unraisablehook = sys.unraisablehook, hook
