"""Open pages in a headless Chromium, as Debian's package `chromium` installs it."""

import shutil

CHROMIUM = shutil.which("chromium")
"""Path of the browser's program; None where there is none."""


def missing_chromium() -> str:
    """Return why pages cannot be opened here; empty if they can."""
    return "" if CHROMIUM else "no chromium on the PATH: apt-get install chromium"
