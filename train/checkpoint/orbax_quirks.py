"""Clean up after orbax calls that fail: unfinished files, pages of log, long errors."""

import functools
import logging
import pathlib
import shutil
import sys
import time

UNFINISHED = ".orbax-checkpoint-tmp"
"""Orbax writes a step under its name with this suffix, and renames it when complete."""


def remove_unfinished(directory: pathlib.Path) -> None:
    """Remove what unfinished saves left; call it while no save is in flight.

    It looks again after each removal, for two seconds at most: the other writers of a
    save end after the one that failed it, and create the files they write anew.
    """
    for _ in range(40):
        remains = list(directory.glob(f"*{UNFINISHED}*"))
        if not remains:
            return
        for path in remains:
            shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.05)


def shorten(fault: Exception) -> str:
    """Return an error as one line of at most 200 letters and its type.

    The beginning says what was done and the end why it failed; the paths between them
    are cut out. So are the source lines that tensorstore appends in brackets.
    """
    text = " ".join(str(fault).split(" [")[0].split())
    if len(text) > 200:
        text = f"{text[:80]} ... {text[-110:]}"
    return f"{type(fault).__name__}: {text}"


@functools.cache
def quiet_orbax() -> None:
    """Drop what orbax prints about an error besides raising it, and nothing of others.

    That is pages of log per save, a traceback per error, and, through the interpreter's
    hook, one for each task that had to end with the event loop of a failed call.
    """

    def is_not_of_orbax(record: logging.LogRecord) -> bool:
        return "/orbax/checkpoint/" not in record.pathname

    def names_no_orbax(record: logging.LogRecord) -> bool:
        # asyncio tells of each task whose error nobody asked for: the code that it ran
        # or the file that it wrote is orbax's.
        return "orbax" not in logging.Formatter().format(record)

    def hook(unraisable) -> None:
        code = getattr(unraisable.object, "cr_code", None)
        of_orbax = code is not None and "/orbax/checkpoint/" in code.co_filename
        if not of_orbax and str(unraisable.exc_value) != "Event loop is closed":
            hook_before(unraisable)

    logging.getLogger("absl").addFilter(is_not_of_orbax)
    logging.getLogger("asyncio").addFilter(names_no_orbax)
    hook_before, sys.unraisablehook = sys.unraisablehook, hook
