"""Damaged folders of safetensors: how to damage a header and an index, and how to read
what is left beside the library `safetensors`, which must agree."""

import json
import pathlib
import random
import re

import numpy as np

from tests.support import mutations
from tests.support.mutations import BYTES, JSON, Mutator
from tests.support.tensor_folders import INDEX, make_arrays, write_shards

HOSTILE_FILES = (
    "../model.safetensors", "/etc/model.safetensors", "..", "", ".", "a/b.safetensors",
    "/dev/zero", "model.safetensors.index.json", "model-00009-of-00009.safetensors",
    "x" * 5000 + ".safetensors", "\0.safetensors", mutations.CONTROL_TEXT,
)  # fmt: skip


def nudge_number(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Change one number of a JSON document a little."""
    numbers = list(re.finditer(rb"-?\d+", whole))
    if not numbers:
        return mutations.flip_bits(whole, other, rng)
    found = rng.choice(numbers)
    value = int(found.group()[:100])
    new = rng.choice((value + 1, value - 1, value + 4, 2 * value, value // 2, -value))
    return whole[: found.start()] + b"%d" % new + whole[found.end() :]


def change_header(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Damage the header of a safetensors file, whose length is then often right."""
    header, data = _split(whole)
    new = rng.choice((*JSON, *(nudge_number,) * 20))(header, _split(other)[0], rng)
    length = len(new)
    if rng.random() < 0.15:
        huge = [size for size in mutations.HUGE_INTS if 0 <= size < 2**64]
        length = rng.choice((*huge, length + 1, max(0, length - 1), 10 * 2**30))
    return length.to_bytes(8, "little") + new + data


def change_file(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Replace the file of one tensor in an index."""
    try:
        record = json.loads(whole)
        name = rng.choice(list(record["weight_map"]))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return mutations.flip_bits(whole, other, rng)
    files = [*HOSTILE_FILES, *(str(f) for f in record["weight_map"].values())]
    record["weight_map"][name] = rng.choice(files)
    return json.dumps(record).encode(errors="surrogatepass")


HEADER: tuple[Mutator, ...] = (*BYTES, *(change_header,) * 40)
"""Mutators of a safetensors file."""
TENSOR_INDEX: tuple[Mutator, ...] = (
    *JSON, *(change_file,) * 10, *(nudge_number,) * 2,
)  # fmt: skip
"""Mutators of an index of safetensors files."""


def build_tensors(folder: pathlib.Path, variant: int) -> None:
    """Write three small files with an index."""
    write_shards(folder / "model", make_arrays(variant))


def read_tensors(folder: pathlib.Path) -> None:
    """Read every tensor. Raise AssertionError where the library refuses the files, or
    reads others."""
    import safetensors

    from moejax.interop.folder import TensorFolder

    opened = TensorFolder(folder / "model")
    got = {name: opened.view(name).read() for name in opened.arrays}
    index = json.loads((folder / "model" / INDEX).read_bytes())
    want = {}
    for file in set(index["weight_map"].values()):
        tensors = safetensors.deserialize((folder / "model" / file).read_bytes())
        want |= dict(tensors)
    assert got.keys() == want.keys()
    for name, record in want.items():
        assert list(got[name].shape) == record["shape"]
        assert got[name].tobytes() == bytes(record["data"])
        assert np.dtype(got[name].dtype).itemsize * got[name].size == len(
            record["data"]
        )


def _split(whole: bytes) -> tuple[bytes, bytes]:
    """Return the header and the tensors of a file, which may be damaged."""
    length = int.from_bytes(whole[:8], "little")
    return whole[8 : 8 + length], whole[8 + length :]
