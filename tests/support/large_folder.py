"""Load a process's share of a large published model, and print what it took.

    python -m tests.support.large_folder FOLDER COUNT INDEX PORT

Process INDEX of COUNT has two devices. The mesh has an expert axis of two, and a data
axis over processes. The last line is a JSON object with the bytes that were read, those
that the process's devices hold on disk, seconds, the peak of anonymous memory above the
arrays, and the speed of plain reads of the files.
"""

import json
import math
import os
import pathlib
import sys
import threading
import time
import zlib

import numpy as np

from moejax.interop import tree
from moejax.interop.architecture import FAMILIES, as_architecture
from moejax.interop.export import plan_model
from moejax.interop.fields import make_network
from moejax.interop.folder import TensorFolder
from moejax.interop.write import write_folder
from moejax.model.flops import num_params
from tests.support.tensor_folders import BF16

OLMOE = {
    "model_type": "olmoe",
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 256,
}
"""OLMoE-1B-7B with two layers of sixteen, and a larger vocabulary."""
SHARD_BYTES = 560 * 10**6
DEVICES_PER_PROCESS = 2
KIB_PER_MIB = 1024
TRANSPOSED = ("proj.weight", "gate.weight")
"""Ends of the names of tensors that our parameters have transposed."""


def build(folder: pathlib.Path) -> None:
    """Write 2 GiB of bfloat16 in four files."""
    network = make_network(as_architecture(OLMOE, "").fields)
    params, bias = tree.abstract(FAMILIES["olmoe"], network)
    options = {"dtype": "bfloat16", "record": OLMOE, "max_shard_bytes": SHARD_BYTES}
    export = plan_model(network, params, bias, **options)
    assert len(export.plan.files) == 4
    assert export.plan.num_bytes == num_bytes() >= 2**31
    shapes = {name: view.shape for name, view in export.tensors.items()}
    write_folder(folder, export.plan, lambda n: make(n, shapes[n]), export.files)


def num_bytes() -> int:
    """Return the bytes of all tensors."""
    network = make_network(as_architecture(OLMOE, "").fields)
    return num_params(network)["total"] * BF16.itemsize


def make(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the values of a tensor, different ones for each name."""
    size = math.prod(shape)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    first = rng.standard_normal(min(size, 2**20)).astype(np.float32)
    return np.resize(first, size).astype(BF16).reshape(shape)


class AnonymousMemory:
    """The largest RssAnon of this process above what it had at the start, in MiB."""

    def __init__(self) -> None:
        self.above_mib = 0.0
        self._first_mib = self._now_mib()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.above_mib = max(self.above_mib, self._now_mib() - self._first_mib)
            time.sleep(0.01)

    def _now_mib(self) -> float:
        status = pathlib.Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / KIB_PER_MIB


def plain_mb_per_sec(folder: pathlib.Path) -> float:
    """Return the speed at which the files are read into one buffer."""
    buffer, total, start_sec = np.empty(2**24, np.uint8), 0, time.perf_counter()
    for path in folder.glob("*.safetensors"):
        with path.open("rb", buffering=0) as file:
            while num := file.readinto(buffer):
                total += num
    return total / (time.perf_counter() - start_sec) / 1e6


def main(folder: pathlib.Path, count: int, index: int, port: int) -> None:
    import jax

    from train.checkpoint.from_hf import read_params
    from train.checkpoint.load import resolve_here
    from train.checkpoint.load_folder import find_folder

    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    mesh = ("Mesh.expert = 2", f"Mesh.data = {count}")
    run = resolve_here(find_folder(folder, params=mesh).cfg, is_mesh_given=True)
    jax.device_put(1.0, jax.local_devices()[0]).block_until_ready()
    plain = plain_mb_per_sec(folder)
    memory, lines = AnonymousMemory(), []
    start_sec, start_cpu_sec = time.perf_counter(), time.process_time()
    params, bias = jax.block_until_ready(read_params(run, say=lines.append))
    seconds = time.perf_counter() - start_sec
    num_bytes = int(lines[-1].split()[1].replace(",", ""))
    leaves = jax.tree.leaves((params, bias))
    result = {
        "bytes_read": num_bytes,
        "bytes_held": sum(map(bytes_held, jax.tree.leaves(params))),
        "seconds": seconds,
        "cpu_sec": time.process_time() - start_cpu_sec,
        "mb_per_sec": num_bytes / seconds / 1e6,
        "plain_mb_per_sec": plain,
        "above_mib": memory.above_mib - sum(map(own_bytes, leaves)) / 2**20,
        "arrays_mib": sum(map(own_bytes, leaves)) / 2**20,
    }
    check(folder, params)
    print(json.dumps(result), flush=True)


def own_bytes(array) -> int:
    """Return the bytes of the parts of an array on this process's devices."""
    return sum(shard.data.nbytes for shard in array.addressable_shards)


def bytes_held(array) -> int:
    """Return the bytes on disk, in bfloat16, of what this process's devices hold of an
    array. What two devices hold counts once."""
    sizes = {str(shard.index): shard.data.size for shard in array.addressable_shards}
    return sum(sizes.values()) * BF16.itemsize


def check(folder: pathlib.Path, params: dict) -> None:
    """Require that tensors of each kind arrived bit for bit."""
    block = params["cycles"]["blocks"][0]
    attention, moe, at = block["attention"], block["moe"], "model.layers.1."
    places = {
        "model.embed_tokens.weight": (params["embed_vd"], ()),
        "lm_head.weight": (params["head_vd"], ()),
        "model.norm.weight": (params["norm"]["scale_d"], ()),
        f"{at}self_attn.q_proj.weight": (attention["q_dhi"], (1,)),
        f"{at}self_attn.o_proj.weight": (attention["out_hid"], (1,)),
        f"{at}mlp.gate.weight": (moe["router_de"], (1,)),
    }
    for expert in (0, 31, 32, 63):
        for ours, name in (
            ("gate_edf", "gate"),
            ("up_edf", "up"),
            ("down_efd", "down"),
        ):
            tensor = f"{at}mlp.experts.{expert}.{name}_proj.weight"
            places[tensor] = (moe[ours], (1, expert))
    with TensorFolder(folder) as opened:
        shapes = {name: opened.entries[name].shape for name in places}
    num_checked = 0
    for name, (array, place) in places.items():
        want = make(name, shapes[name]).astype(np.float32)
        want = want.T if name.endswith(TRANSPOSED) else want
        for shard in array.addressable_shards:
            outer, inner = shard.index[: len(place)], shard.index[len(place) :]
            at = tuple(i - (part.start or 0) for i, part in zip(place, outer))
            got = np.asarray(shard.data)
            if all(0 <= i < size for i, size in zip(at, got.shape)):
                assert np.array_equal(got[at], want[inner]), (name, shard.index)
                num_checked += 1
    assert num_checked >= 14, num_checked


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={DEVICES_PER_PROCESS}"
    )
    main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
