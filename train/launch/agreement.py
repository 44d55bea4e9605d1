"""Refuse a run whose processes differ: in configuration, code, libraries, data, devices
or kernels.

Every process trains a part of one model. One that computes another function, or reads
other data, would spoil the result without an error. So before anything is compiled each
process tells process 0 some texts (facts), and all end with one line that names the
first difference.
"""

import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import sys
from collections.abc import Callable, Mapping

from train.launch import coordinator

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIBRARIES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy",
    "ml-dtypes", "jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13",
    "nvidia-nccl-cu13",
)  # fmt: skip
"""Distributions that decide what is computed or read."""
JAX_SETTINGS = (
    "jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable",
    "jax_default_prng_impl", "jax_numpy_dtype_promotion", "jax_disable_jit",
)  # fmt: skip
"""Settings of jax that decide what is computed."""
OWN_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")
"""Beginnings of XLA's flags that may differ between processes."""


def require_same(name: str, facts: Mapping[str, str]) -> None:
    """Raise ValueError on all processes if the facts of one differ from process 0's.

    A fact is a text of one or more lines; the message names the first differing line of
    the first fact, on both processes. Every process calls this once with each `name`.
    """
    if verdict := merged(f"facts of the {name}", json.dumps(facts), _verdict):
        raise ValueError(verdict)


def merged(name: str, text: str, merge: Callable[[list[str]], str]) -> str:
    """Return merge(texts) on all processes, from the texts that they give in their
    order. Process 0 merges.

    The texts go through the coordinator and not through devices. Every process calls
    this once with each `name`.
    """
    if not coordinator.is_here():
        return merge([text])
    index, count = coordinator.own_index(), coordinator.count()
    coordinator.put(f"told/{name}/{index}", text)
    if index == 0:
        texts = [coordinator.wait_for(f"told/{name}/{i}") for i in range(count)]
        coordinator.put(f"merged/{name}", merge(texts))
    return coordinator.wait_for(f"merged/{name}")


def _verdict(texts: list[str]) -> str:
    """Return how the facts of processes differ from those of process 0, as one line, or
    '' if all are the same."""
    facts, *others = map(json.loads, texts)
    different = {i: x for i, x in enumerate(others, 1) if x != facts}
    if not different:
        return ""
    first, *rest = different
    more = f" (others that differ: {', '.join(map(str, rest[:16]))})" if rest else ""
    return (
        "the processes of this run are not the same: "
        f"{first_difference(facts, different[first], first)}{more}: start all of them "
        "with the same arguments, code, libraries and data"
    )


def first_difference(
    facts: Mapping[str, str], other: Mapping[str, str], index: int
) -> str:
    """Return the first line in which the facts of process `index` differ from those of
    process 0."""
    for fact in dict.fromkeys([*facts, *other]):
        both = [x.get(fact, "").splitlines() for x in (facts, other)]
        for lines in itertools.zip_longest(*both, fillvalue="nothing"):
            if lines[0] != lines[1]:
                same = itertools.takewhile(lambda x: x[0] == x[1], zip(*lines))
                begin = max(0, len(list(same)) - 100)
                here, there = (repr(line[begin : begin + 200]) for line in lines)
                return f"{fact}: process 0 has {here}, process {index} has {there}"
    raise AssertionError("the facts are the same")


def program_facts() -> dict[str, str]:
    """Return the facts about this program: its source, libraries and settings of jax.

    They are known before any device is touched.
    """
    import jax

    settings = [f"{name} = {getattr(jax.config, name)!r}" for name in JAX_SETTINGS]
    flags = os.environ.get("XLA_FLAGS", "").split()
    settings += [f"XLA {word}" for word in flags if not word.startswith(OWN_FLAGS)]
    paths = [p for room in ("moejax", "train") for p in (ROOT / room).rglob("*.py")]
    sources = [f"{path.relative_to(ROOT)} {_file_hash(path)}" for path in sorted(paths)]
    return {
        "code": "\n".join(sources),
        "libraries": "\n".join(_versions()),
        "settings of jax": "\n".join(settings),
    }


def device_facts() -> dict[str, str]:
    """Return the facts about the devices of this process: their platform and kind, and
    the files with the tiles of kernels on their kinds."""
    import jax

    from moejax.kernels import device_file  # imports jax

    devices = jax.local_devices()
    kinds = sorted({f"{d.platform} {d.device_kind}" for d in devices})
    paths = sorted({device_file.path_of(d.device_kind) for d in devices})
    hashes = (_file_hash(path) if path.is_file() else "is not here" for path in paths)
    return {
        "devices": "\n".join(kinds),
        "runtime of the devices": devices[0].client.platform_version,
        "choices of kernels": "\n".join(
            f"{path.name} {text}" for path, text in zip(paths, hashes)
        ),
    }


def _file_hash(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _versions() -> list[str]:
    """Return a line with the version of Python and of each library that is here."""
    lines = [f"Python {platform.python_version()} {sys.implementation.name}"]
    for name in LIBRARIES:
        try:
            lines.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name} is not installed")
    return lines
