"""The CUDA plugin of JAX, in a folder of its own that only ahead-of-time compilation
uses.

`make aot-wheels` makes the folder, without CUDA's libraries: nothing runs, so that none
is needed. In the shared environment the plugin would register in every process.
"""

import os
import pathlib
import re
import sys

FOLDER = pathlib.Path(__file__).resolve().parents[2] / ".aot"
HOW = "`make aot-wheels` installs it (142 MB, no GPU and no CUDA libraries needed)"


def missing() -> str | None:
    """Return why the plugin cannot be used, or None if it can."""
    if not (FOLDER / "jax_plugins" / "xla_cuda13").is_dir():
        return f"the CUDA plugin of JAX is not in {FOLDER.name}: {HOW}"
    found = [
        match[1]
        for path in FOLDER.glob("jax_cuda13_plugin-*.dist-info")
        if (match := re.fullmatch(r"jax_cuda13_plugin-(.+)\.dist-info", path.name))
    ]
    needed = _version_of_jax()
    if found != [needed]:
        have = ", ".join(found) or "of no version"
        return f"the CUDA plugin in {FOLDER.name} is {have}, and JAX {needed}: {HOW}"
    return None


def put_on_path() -> None:
    """Let JAX find the plugin, in this process alone and without a GPU.

    It must be called before JAX starts a backend. Raises ValueError, which says how to
    get the plugin, where it is missing or of another version.
    """
    if why := missing():
        raise ValueError(why)
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))


def _version_of_jax() -> str:
    """Return the version of JAX that is installed, without an import of it."""
    import importlib.metadata

    return importlib.metadata.version("jax")
