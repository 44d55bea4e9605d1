"""The pack of tools/bringup.py: wheels and a corpus for a machine without a network."""

import json
import pathlib
import shlex
import subprocess
import sys
import tempfile
from typing import Any

from tools.stages.machine import ROOT, wanted
from train.files import write_whole

MODULES = (
    "gin", "grain", "array_record", "flax", "optax", "orbax.checkpoint", "jaxtyping",
    "wadler_lindig", "tensorstore", "rich", "etils", "humanize", "simplejson",
    "aiofiles", "nest_asyncio2", "portpicker", "treescope", "msgpack", "cloudpickle",
    "absl-py", "typing_extensions", "ptyprocess", "markdown-it-py", "mdurl",
    "pygments", "yaml", "psutil", "uvloop", "zipp", "fsspec",
)  # fmt: skip
"""Modules that training imports, and their needs, without those that come with JAX and
its plugin for CUDA 13, which such a machine must have."""
PEERS = (
    "tokamax", "einshape", "immutabledict", "pydantic", "pydantic-core",
    "annotated-types", "typing-inspection", "qwix", "typeguard",
)  # fmt: skip
"""Wheels of `make peers`: another implementation of the products, to compare with."""
MAX_BYTES = 60 * 2**20
PLATFORMS = (
    *(f"manylinux_2_{x}_x86_64" for x in (39, 34, 31, 28, 27, 24, 17, 12, 5)),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
SOURCES = ("docs/**/*.md", "moejax/**/*.py", "train/**/*.py", "tools/**/*.py")
"""Files of this repository that are the text of the corpus."""
INSTALL = (
    "python3 -m pip install --no-index --no-deps --no-compile --upgrade "
    "--target {site} {wheels} && export PYTHONPATH={site}"
)


def write(folder: pathlib.Path) -> dict[str, Any]:
    """Write the pack into a folder that is new or empty, and return what it holds.

    Raises ValueError for another folder, for a wheel that pip does not find, and for a
    pack of more than 60 MiB; OSError if the folder cannot be written.
    """
    folder = folder.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--pack={folder} is not an empty folder: name another")
    folder.mkdir(parents=True, exist_ok=True)
    names = [wanted(module) for module in MODULES + PEERS]
    download(names, folder / "wheels")
    write_corpus(folder / "corpus")
    line = INSTALL.format(site="/tmp/site", wheels="DIR/wheels/*.whl")
    write_whole(
        folder / "INSTALL.txt",
        f"{line}\npython tools/bringup.py --corpus DIR/corpus\n",
    )
    sizes = {
        part.name: sum(p.stat().st_size for p in part.rglob("*") if p.is_file())
        for part in (folder / "wheels", folder / "corpus")
    }
    total = sum(sizes.values())
    print(f"{len(names)} wheels, {sizes['wheels'] / 2**20:.1f} MiB")
    print(f"corpus, {sizes['corpus'] / 2**20:.1f} MiB")
    print(f"{folder}: {total / 2**20:.1f} MiB of at most {MAX_BYTES / 2**20:.0f}")
    print(f"there: {line.replace('DIR', folder.name)}")
    if total > MAX_BYTES:
        raise ValueError(
            f"the pack has {total / 2**20:.1f} MiB, more than {MAX_BYTES / 2**20:.0f}: "
            "take wheels out of MODULES or PEERS in tools/stages/pack.py"
        )
    return {"folder": str(folder), "wheels": names, "bytes": total}


def download(names: list[str], folder: pathlib.Path) -> None:
    """Download wheels by name and version for Python 3.12 on x86-64 Linux. Raises
    ValueError if pip does not find one."""
    words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps"]
    words += ["--disable-pip-version-check", "--only-binary=:all:", "--dest"]
    words += [str(folder), "--python-version", "3.12", "--implementation", "cp"]
    for platform in PLATFORMS:
        words += ["--platform", platform]
    done = subprocess.run([*words, *names], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [x for x in done.stderr.split("\n") if x.startswith("ERROR")]
        raise ValueError(
            f"pip finds no wheel: {errors[-1] if errors else done.stderr[-300:]}; "
            f"try {shlex.join([*words[:5], '..', names[0]])}"
        )


def write_corpus(folder: pathlib.Path) -> None:
    """Write the texts of this repository as token shards, one token per byte, by
    tools/prepare.py. Raises ValueError if it fails."""
    with tempfile.TemporaryDirectory() as name:
        path = pathlib.Path(name) / "texts.jsonl"
        with path.open("w") as file:
            for pattern in SOURCES:
                for source in sorted(ROOT.glob(pattern)):
                    text = source.read_text(encoding="utf-8")
                    file.write(json.dumps({"text": text}) + "\n")
        words = [sys.executable, "tools/prepare.py", str(path), f"--out={folder}"]
        done = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise ValueError(f"tools/prepare.py: {done.stderr.strip()[-300:]}")
