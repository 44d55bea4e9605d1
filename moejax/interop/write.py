"""Write a folder of safetensors: tensor by tensor, all files or none.

The folder is written under another name beside its own, and renamed when all its bytes
are on the disk. The same tensors give the same bytes.
"""

import contextlib
import dataclasses
import errno
import io
import json
import math
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from moejax.interop.folder import INDEX, SINGLE
from moejax.interop.header import encode_header, file_order

MAX_SHARD_BYTES = 5 * 10**9
"""Bytes of tensors in a file, as published checkpoints have them."""
BLOCK_ELEMENTS = 2**22
"""Elements of a tensor that are cast and written at a time."""

Spec = tuple[np.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor to write."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The files of a folder, and the tensors of each in the order of its bytes."""

    specs: Mapping[str, Spec]
    files: Mapping[str, tuple[str, ...]]

    @property
    def names(self) -> list[str]:
        """The names of all tensors in the order in which they are written."""
        return [name for names in self.files.values() for name in names]

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all tensors."""
        return sum(map(_num_bytes, self.specs.values()))


def plan_folder(
    specs: Mapping[str, Spec], max_shard_bytes: int = MAX_SHARD_BYTES
) -> Plan:
    """Return how tensors are put in files of at most `max_shard_bytes`.

    A file is filled in the order of `specs` until the next tensor does not fit; a
    larger tensor has a file of its own. One file is called model.safetensors, several
    model-00001-of-0000N.safetensors.
    """
    shards: list[list[str]] = [[]]
    num_bytes = 0
    for name, (dtype, shape) in specs.items():
        size = _num_bytes((dtype, shape))
        if shards[-1] and num_bytes + size > max_shard_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(name)
        num_bytes += size
    titles = [SINGLE]
    if len(shards) > 1:
        of = f"of-{len(shards):05d}.safetensors"
        titles = [f"model-{i:05d}-{of}" for i in range(1, len(shards) + 1)]
    files = {
        title: tuple(file_order({name: specs[name] for name in names}))
        for title, names in zip(titles, shards)
    }
    return Plan(dict(specs), files)


def write_folder(
    folder: str | os.PathLike,
    plan: Plan,
    value: Callable[[str], np.ndarray],
    others: Mapping[str, bytes],
) -> None:
    """Write a folder with the tensors of a plan and with other files, such as
    config.json, by name.

    `value(name)` returns a tensor; it is called once for each of `plan.names`, in their
    order, when the one before is written. Values are rounded to the dtype of the plan,
    to nearest even. Where several processes must take part in `value`, one of them
    calls this function, and the others call `value` for the same names in the same
    order.

    Raises ValueError where the folder exists and is not empty, and OSError, which names
    a file, where the disk is full or cannot be written. Then nothing is left. Only a
    process that is killed leaves the folder under its temporary name,
    <name>.<random>.tmp.
    """
    folder = pathlib.Path(folder)
    require_new(folder)
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    _require_room(folder, plan.num_bytes)
    with whole_folder(folder) as partial:
        for title, names in plan.files.items():
            _write_shard(partial / title, {n: plan.specs[n] for n in names}, value)
        if len(plan.files) > 1:
            others = {**others, INDEX: _index(plan)}
        for title, data in others.items():
            _write(partial / title, data)


def require_new(folder: pathlib.Path) -> None:
    """Raise ValueError unless there is nothing at a path, or an empty folder."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not empty: remove it or name another")


@contextlib.contextmanager
def whole_folder(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield a new folder beside `folder`, to which it is renamed at the end of the
    block; after an error nothing is left in the folder of both."""
    partial = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.tmp")
    try:
        partial.mkdir(parents=True)
        yield partial
        _sync_folder(partial)
        partial.rename(folder)
        _sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_shard(
    path: pathlib.Path, specs: Mapping[str, Spec], value: Callable[[str], np.ndarray]
) -> None:
    with _naming(path), path.open("wb", buffering=0) as file:
        _write_all(file, encode_header(specs))
        for name, (dtype, shape) in specs.items():
            array = np.asarray(value(name))
            assert array.shape == tuple(shape), (name, array.shape, shape)
            flat = array.reshape(-1)
            for first in range(0, flat.size, BLOCK_ELEMENTS):
                block = flat[first : first + BLOCK_ELEMENTS].astype(dtype, copy=False)
                _write_all(file, block.view(np.uint8).data)
            del array, flat
        os.fsync(file.fileno())


def _write(path: pathlib.Path, data: bytes) -> None:
    with _naming(path), path.open("wb", buffering=0) as file:
        _write_all(file, data)
        os.fsync(file.fileno())


def _write_all(file: io.RawIOBase, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _index(plan: Plan) -> bytes:
    weight_map = {name: title for title, names in plan.files.items() for name in names}
    record = {
        "metadata": {"total_size": plan.num_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return (json.dumps(record, indent=2, ensure_ascii=False) + "\n").encode()


def _require_room(folder: pathlib.Path, num_bytes: int) -> None:
    """Raise OSError if the disk has fewer bytes free than the tensors have."""
    free = shutil.disk_usage(folder.parent).free
    if free < num_bytes:
        raise OSError(
            errno.ENOSPC,
            f"the tensors need {num_bytes:,} bytes, and {free:,} are free: name a "
            "folder on another disk",
            os.fspath(folder),
        )


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Put the path into an OSError of the block that names no file, as those of writes
    do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


def _sync_folder(folder: pathlib.Path) -> None:
    """Return when the names in a folder are on the disk. Some file systems cannot sync
    folders, and say so by EINVAL."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _num_bytes(spec: Spec) -> int:
    dtype, shape = spec
    return math.prod(shape) * dtype.itemsize
