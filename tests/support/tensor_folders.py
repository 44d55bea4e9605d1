"""Folders of safetensors for tests, right and wrong."""

import json
import pathlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from moejax.config import Mla, Model, Moe, Network, Router
from moejax.interop import tree
from moejax.interop.export import write_model
from moejax.interop.families import FAMILIES
from moejax.interop.header import DTYPES
from moejax.interop.write import plan_folder, write_folder

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TINY = {
    "mixtral": Network(
        Model(8, 8, 2, 2, 1, head_dim=4, d_ff=4), Moe(num_experts=2, d_expert=4)
    ),
    "deepseek_v3": Network(
        Model(8, 8, 2, 2, 2, head_dim=4, d_ff=6, first_k_dense=1),
        Moe(num_experts=2, d_expert=4, num_shared_experts=1),
        Router(kind="sigmoid"),
        mla=Mla(4, None, 4, 2, 4),
    ),
}
"""Networks of a few hundred parameters, by family."""


def write_raw(
    path: pathlib.Path, header: object, data: bytes = b"", length: int | None = None
) -> pathlib.Path:
    """Write a safetensors file with this header (JSON, or bytes as they are), these
    bytes of tensors and, if it is given, this length in place of the header's."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)
    return path


def write_arrays(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> pathlib.Path:
    """Write a safetensors file of arrays of any dtype, one after the other."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    header, stop = {}, 0
    for name, array in arrays.items():
        start, stop = stop, stop + array.nbytes
        header[name] = {
            "dtype": names[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, stop],
        }
    data = b"".join(array.tobytes() for array in arrays.values())
    return write_raw(path, header, data)


def make_arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Return a few arrays of float32 and bfloat16."""
    rng = np.random.default_rng(seed)
    shapes = {"a": (6, 10), "b.c": (3,), "d": (2, 3, 4), "e": (), "f": (0, 5)}
    arrays = {n: rng.standard_normal(s).astype("f") for n, s in shapes.items()}
    return arrays | {"g": rng.standard_normal((4, 6)).astype(BF16)}


def write_shards(
    folder: pathlib.Path, arrays: Mapping[str, np.ndarray], max_shard_bytes: int = 120
) -> pathlib.Path:
    """Write float arrays as a folder with an index, and return the folder."""
    specs = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    write_folder(folder, plan_folder(specs, max_shard_bytes), arrays.__getitem__, {})
    return folder


def edit_json(path: pathlib.Path, **changes: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_tiny(out: pathlib.Path, name: str) -> pathlib.Path:
    """Write the network of TINY with zeros for parameters, and return the folder."""
    trees = map(tree.as_tree, tree.abstract(FAMILIES[name], TINY[name]))
    write_model(out, TINY[name], *trees, family=name, dtype="float32")
    return out
