"""A folder of safetensors: one file, or several with an index, opened and checked."""

import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from moejax.interop.boxes import shape_of
from moejax.interop.header import Entry
from moejax.interop.strict_json import quoted, read_json
from moejax.interop.tensor_file import TensorFile
from moejax.interop.views import View, assign

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
NUM_NAMED = 3
"""Number of names that an error lists."""


class TensorFolder:
    """The tensors of a folder. Headers have been read and checked, tensors have not.

    It is a context manager that closes the files at the end of the block. Several
    threads may read from it.
    """

    def __init__(self, folder: str | os.PathLike):
        """Open SINGLE, or INDEX and the files that it names.

        Raises OSError, and ValueError, one line, where a header is not as `read_header`
        demands, or the index not as `_read_index` does.
        """
        self.path = pathlib.Path(folder)
        self.entries: dict[str, Entry] = {}
        """The dtype, shape and place of each tensor, by name."""
        self.notes: tuple[str, ...] = ()
        """Lines about what is unusual and not wrong, for a program to print."""
        self._files: list[TensorFile] = []
        self._file_by_name: dict[str, TensorFile] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "TensorFolder":
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()

    @property
    def bytes_read(self) -> int:
        """The number of bytes of tensors that were read so far."""
        return sum(file.bytes_read for file in self._files)

    @property
    def num_files(self) -> int:
        """The number of files that hold tensors."""
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def view(self, name: str, shape: Sequence[int] | None = None) -> "Tensor":
        """Return a tensor that is not read yet.

        Raises ValueError if the folder does not have it, or not with this shape.
        """
        if name not in self.entries:
            raise ValueError(
                f"{self.path} has no tensor {quoted(name)}: download the folder again, "
                "or correct config.json if the model should not have it"
            )
        tensor = Tensor(self._file_by_name[name], name)
        if shape is not None and tensor.shape != tuple(shape):
            raise ValueError(
                f"{tensor.label} has shape {list(tensor.shape)}, and config.json says "
                f"{list(shape)}: they belong to different models"
            )
        return tensor

    def read(self, name: str, index: Sequence[slice] | None = None) -> np.ndarray:
        """Return a tensor, or the part that a tuple of slices cuts out, in its own
        dtype. No other part of it is read.

        Raises ValueError as `view` does, and for indices that are no slices without a
        step.
        """
        return self.view(name).read(index)

    def _open(self) -> None:
        single, index = self.path / SINGLE, self.path / INDEX
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is no folder: give the one with config.json")
        if index.exists():
            self._open_shards(resolve(self.path, INDEX))
        elif single.exists():
            file = self._open_file(SINGLE)
            self._add(dict.fromkeys(file.entries, file))
        else:
            names = sorted(os.listdir(self.path))
            pickled = [name for name in names if name.endswith(PICKLES)]
            why = f"has neither {SINGLE} nor {INDEX}"
            if pickled:
                raise ValueError(
                    f"{self.path} {why}, and {quoted(pickled[0])} may be a pickle, "
                    "which can run code and is not read: convert it to safetensors"
                )
            raise ValueError(f"{self.path} {why}: give the folder with the tensors")

    def _open_shards(self, index: pathlib.Path) -> None:
        shard_by_name, total_bytes = _read_index(index)
        shards = sorted(set(shard_by_name.values()))
        if SINGLE not in shards and (self.path / SINGLE).exists():
            raise ValueError(
                f"{self.path} has {SINGLE} and {INDEX}, which does not name it: remove "
                "the one that is not meant"
            )
        missing = [name for name in shards if not (self.path / name).exists()]
        if missing:
            raise ValueError(
                f"{index}: {len(missing)} of {len(shards)} files are missing, "
                f"{_list(missing)}: download them"
            )
        files = {shard: self._open_file(shard) for shard in shards}
        named: dict[str, set[str]] = {shard: set() for shard in shards}
        for name, shard in shard_by_name.items():
            named[shard].add(name)
        for shard, file in files.items():
            _check_shard(named[shard], file, index)
        self._add({name: files[shard] for name, shard in shard_by_name.items()})
        num_bytes = sum(entry.num_bytes for entry in self.entries.values())
        if total_bytes is not None and total_bytes != num_bytes:
            self.notes = (
                f"{index} states a total_size of {total_bytes:,} bytes, and the "
                f"tensors have {num_bytes:,}; every shard is whole.",
            )

    def _add(self, file_by_name: dict[str, TensorFile]) -> None:
        self._file_by_name = file_by_name
        self.entries = {name: file.entries[name] for name, file in file_by_name.items()}

    def _open_file(self, name: str) -> TensorFile:
        file = TensorFile(resolve(self.path, name))
        self._files.append(file)
        return file


class Tensor(View):
    """A tensor of a file."""

    def __init__(self, file: TensorFile, name: str):
        entry = file.entries[name]
        order = tuple(range(len(entry.shape)))
        super().__init__(
            entry.shape, entry.dtype, order, f"{file.path}: tensor {quoted(name)}"
        )
        self._file, self._name = file, name

    def fill(self, out, box) -> None:
        is_direct = out.flags.c_contiguous and out.dtype == self.dtype
        target = out if is_direct else np.empty(shape_of(box), self.dtype)
        self._file.read_box(self._name, box, target)
        if not is_direct:
            assign(out, target)


def _read_index(path: pathlib.Path) -> tuple[dict[str, str], int | None]:
    """Return the file of each tensor, and the total size that the index states, if any.

    Raises ValueError, one line, unless the index is JSON without duplicate names whose
    weight_map names .safetensors files of the folder itself.
    """
    record = read_json(path, "the index")
    weight_map = record.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{path}: the index has no weight_map from tensors to files: download it "
            "again"
        )
    for name, shard in weight_map.items():
        if not _is_plain(shard):
            raise ValueError(
                f"{path}: tensor {quoted(name)} is said to be in {quoted(shard)}, and "
                "files must be .safetensors in the folder itself: download the index "
                "again from a source that you trust"
            )
    metadata = record.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    return weight_map, total if isinstance(total, int | float) else None


def _is_plain(name: object) -> bool:
    """Return whether a value is a file name, without a folder, that ends in
    .safetensors and prints as it is."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and name.isprintable()
        and not name.startswith(".")
        and not set(name) & set("/\\")
    )


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


def _check_shard(named: set[str], file: TensorFile, index: pathlib.Path) -> None:
    """Raise ValueError unless a shard has exactly the tensors that the index says."""
    absent = sorted(named - file.entries.keys())
    if absent:
        raise ValueError(
            f"{index}: {file.path.name} does not have {_list(absent)}, which the index "
            "says is there: download both again"
        )
    unnamed = sorted(file.entries.keys() - named)
    if unnamed:
        raise ValueError(
            f"{index}: {file.path.name} has {_list(unnamed)}, which the index does not "
            "say: download both again"
        )


def _list(names: Sequence[str]) -> str:
    """Return the first names, and how many others there are."""
    more = len(names) - NUM_NAMED
    text = ", ".join(quoted(name) for name in names[:NUM_NAMED])
    return f"{text} and {more:,} more" if more > 0 else text
