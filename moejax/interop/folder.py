"""A folder of safetensors: one file, or several with an index, checked and mapped."""

import os
import pathlib
import threading
from collections.abc import Sequence

import numpy as np

from moejax.interop.header import map_tensors
from moejax.interop.strict_json import quoted, read_json
from moejax.interop.views import View, held

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
NUM_NAMED = 3
"""Number of names that an error lists."""


class TensorFolder:
    """The tensors of a folder, mapped into memory. Several threads may read them."""

    def __init__(self, folder: str | os.PathLike):
        """Open SINGLE, or INDEX and the files that it names.

        Raises OSError, and ValueError, one line, where a file is not as `map_tensors`
        demands, or the index does not agree with the files.
        """
        self.path = pathlib.Path(folder)
        self.arrays: dict[str, np.ndarray] = {}
        """The tensors by name. They are parts of mapped files."""
        self.bytes_read = 0
        """The number of bytes of tensors that views have read so far."""
        self._lock = threading.Lock()
        self._shard_by_name: dict[str, str] = {}
        files = _open_files(self.path)
        self.num_files = len(files)
        for shard, arrays in files.items():
            self.arrays |= arrays
            self._shard_by_name |= dict.fromkeys(arrays, shard)

    def view(self, name: str, shape: Sequence[int] | None = None) -> View:
        """Return a tensor that is not read yet.

        Raises ValueError if the folder does not have it, or not with this shape.
        """
        if name not in self.arrays:
            raise ValueError(
                f"{self.path} has no tensor {quoted(name)}: download the folder again, "
                "or correct config.json if the model should not have it"
            )
        array = self.arrays[name]
        label = f"{self.path / self._shard_by_name[name]}: tensor {quoted(name)}"
        if shape is not None and array.shape != tuple(shape):
            raise ValueError(
                f"{label} has shape {list(array.shape)}, and config.json says "
                f"{list(shape)}: they belong to different models"
            )
        return held(array, label, self._count)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.bytes_read += num_bytes


def resolve(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Return the path of a file of a folder.

    Raises ValueError if it is a link that leaves the folder. The one exception is the
    cache of huggingface_hub, where `snapshots/<revision>` has links into `blobs` of the
    same repository.
    """
    target = pathlib.Path(os.path.realpath(folder / name))
    real = pathlib.Path(os.path.realpath(folder))
    allowed = [real]
    if real.parent.name == "snapshots":
        allowed.append(real.parent.parent / "blobs")
    if target.parent not in allowed:
        raise ValueError(
            f"{folder / name} is a link that leaves the folder, to {target}: copy the "
            "file into the folder"
        )
    return folder / name


def _open_files(folder: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
    """Return the tensors of each file."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the one with config.json")
    has_single, has_index = (folder / SINGLE).exists(), (folder / INDEX).exists()
    if has_index:
        names_by_shard = _read_index(resolve(folder, INDEX))
        if has_single and SINGLE not in names_by_shard:
            raise ValueError(
                f"{folder} has {SINGLE} and {INDEX}, which does not name it: remove "
                "the one that is not meant"
            )
    elif has_single:
        names_by_shard = {SINGLE: None}
    else:
        pickled = [n for n in sorted(os.listdir(folder)) if n.endswith(PICKLES)]
        why = f"{folder} has neither {SINGLE} nor {INDEX}"
        if pickled:
            raise ValueError(
                f"{why}, and {quoted(pickled[0])} may be a pickle, which can run code "
                "and is not read: convert it to safetensors"
            )
        raise ValueError(f"{why}: give the folder with the tensors")
    missing = [name for name in names_by_shard if not (folder / name).exists()]
    if missing:
        raise ValueError(
            f"{folder / INDEX}: {len(missing)} of {len(names_by_shard)} files are "
            f"missing, {_list(missing)}: download them"
        )
    files = {}
    for shard, names in names_by_shard.items():
        files[shard] = map_tensors(resolve(folder, shard))
        others = set() if names is None else names ^ files[shard].keys()
        if others:
            raise ValueError(
                f"{folder / INDEX} and {shard} disagree about {_list(sorted(others))}: "
                "download both again"
            )
    return files


def _read_index(path: pathlib.Path) -> dict[str, set[str]]:
    """Return the names of the tensors of each file, by an index.

    Raises ValueError, one line, unless the index is JSON without duplicate names whose
    weight_map names .safetensors files of the folder itself.
    """
    weight_map = read_json(path, "the index").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{path}: the index has no weight_map from tensors to files: download it "
            "again"
        )
    names_by_shard: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        is_plain = (
            isinstance(shard, str)
            and shard.endswith(".safetensors")
            and shard.isprintable()
            and not set(shard) & set("/\\")
        )
        if not is_plain:
            raise ValueError(
                f"{path}: tensor {quoted(name)} is said to be in {quoted(shard)}, and "
                "files must be .safetensors in the folder itself: download the index "
                "again from a source that you trust"
            )
        names_by_shard.setdefault(shard, set()).add(name)
    return names_by_shard


def _list(names: Sequence[str]) -> str:
    """Return the first names, and how many others there are."""
    more = len(names) - NUM_NAMED
    text = ", ".join(quoted(name) for name in names[:NUM_NAMED])
    return f"{text} and {more:,} more" if more > 0 else text
