"""Open pages in a headless Chromium, as Debian's package `chromium` installs it."""

import shutil

CHROMIUM = shutil.which("chromium")
"""Path of the browser's program; None where there is none."""
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
"""Arguments with which Chromium starts as root and asks no host for anything itself."""


def missing_chromium() -> str:
    """Return why pages cannot be opened here; empty if they can."""
    return "" if CHROMIUM else "no chromium on the PATH: apt-get install chromium"
