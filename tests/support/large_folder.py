"""Read a process's share of a large checkpoint, and print what it took.

    python -m tests.support.large_folder FOLDER COUNT INDEX PORT

Process INDEX of COUNT has two devices. The last line is a JSON object with the bytes
that were read, those that the process's devices hold on disk, seconds, the peak of
anonymous memory above the arrays, and the speed of plain reads of the files.
"""

import json
import os
import pathlib
import sys
import threading
import time
import zlib

import numpy as np

from moejax.interop import views
from moejax.interop.folder import TensorFolder
from moejax.interop.write import plan_folder, write_folder
from tests.support.tensor_folders import BF16

L, E, D, F, V = 4, 8, 2048, 2048, 131072
SHAPES = {
    **{f"{i}.{e}.{name}": (F, D) for i in range(L) for e in range(E)
       for name in ("gate", "up", "down")},
    **{f"{i}.{name}": (4096, D) for i in range(L) for name in ("q", "k", "v", "o")},
    "embed": (V, D),
    "head": (V, D),
    "norm": (D,),
}  # fmt: skip
SHARD_BYTES = 520 * 2**20
DEVICES_PER_PROCESS = 2
KIB_PER_MIB = 1024


def build(folder: pathlib.Path) -> None:
    """Write 2 GiB in four files."""
    plan = plan_folder({name: (BF16, s) for name, s in SHAPES.items()}, SHARD_BYTES)
    assert len(plan.files) == 4
    assert 2**31 <= plan.num_bytes < 2**31 + 2**20
    write_folder(folder, plan, make, {})


def make(name: str) -> np.ndarray:
    """Return the values of a tensor, different ones for each name."""
    size = int(np.prod(SHAPES[name]))
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    first = rng.standard_normal(min(size, 2**20)).astype(np.float32)
    return np.resize(first, size).astype(BF16).reshape(SHAPES[name])


def parameters(folder: TensorFolder) -> dict[str, tuple[views.View, tuple]]:
    """Return the view of each parameter, and the mesh axes of its dims.

    Among them are rows and columns of transposed tensors, and an array that every
    device has.
    """

    def over_layers(name: str) -> views.View:
        return views.stacked([folder.view(f"{i}.{name}") for i in range(L)])

    def experts(name: str) -> views.View:
        layers = [
            views.stacked([folder.view(f"{i}.{e}.{name}") for e in range(E)])
            for i in range(L)
        ]
        return views.transposed(views.stacked(layers), (0, 1, 3, 2))

    return {
        "embed": (folder.view("embed"), ("x",)),
        "head": (folder.view("head"), (None, "x")),
        "gate": (experts("gate"), (None, "x")),
        "up": (experts("up"), (None, None, "x")),
        "down": (experts("down"), (None, None, None, "x")),
        "q": (views.transposed(over_layers("q"), (0, 2, 1)), (None, None, "x")),
        "k": (views.transposed(over_layers("k"), (0, 2, 1)), (None, "x")),
        "v": (over_layers("v"), (None, "x")),
        "o": (over_layers("o"), (None, None, "x")),
        "norm": (folder.view("norm"), ()),
    }


class AnonymousMemory:
    """The largest RssAnon of this process above what it had at the start and above
    arrays, in MiB."""

    def __init__(self) -> None:
        self.above_mib = 0.0
        self.arrays_mib = 0.0
        self._first_mib = self._now_mib()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            above_mib = self._now_mib() - self._first_mib - self.arrays_mib
            self.above_mib = max(self.above_mib, above_mib)
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
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from moejax.interop.arrays import to_arrays

    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    jax.device_put(1.0, jax.local_devices()[0]).block_until_ready()
    plain = plain_mb_per_sec(folder)
    memory, num_held, arrays = AnonymousMemory(), 0, {}
    start_sec, start_cpu_sec = time.perf_counter(), time.process_time()
    with TensorFolder(folder) as opened:
        for name, (view, axes) in parameters(opened).items():
            where = NamedSharding(mesh, P(*axes))
            share = DEVICES_PER_PROCESS if axes else 1
            size = int(np.prod(where.shard_shape(view.shape))) * share
            num_held += size * view.dtype.itemsize
            # Every device has its own array, also of what all have.
            memory.arrays_mib += size * (DEVICES_PER_PROCESS // share) * 4 / 2**20
            arrays |= to_arrays({name: view}, {name: where})
        num_bytes = opened.bytes_read
    seconds = time.perf_counter() - start_sec
    result = {
        "bytes_read": num_bytes, "bytes_held": num_held, "seconds": seconds,
        "cpu_sec": time.process_time() - start_cpu_sec,
        "mb_per_sec": num_bytes / seconds / 1e6, "plain_mb_per_sec": plain,
        "above_mib": memory.above_mib, "arrays_mib": memory.arrays_mib,
    }  # fmt: skip
    check(arrays)
    print(json.dumps(result), flush=True)


def check(arrays: dict) -> None:
    """Require that a tensor of each kind arrived bit for bit."""
    kinds = {name: ((), name, False) for name in ("embed", "head", "norm")}
    for name in ("gate", "up", "down"):
        kinds[name] = ((1, 3), f"1.3.{name}", True)
    for name in ("q", "k", "v", "o"):
        kinds[name] = ((1,), f"1.{name}", name in ("q", "k"))
    for name, (place, source, is_transposed) in kinds.items():
        want = make(source).astype(np.float32)
        want = want.T if is_transposed else want
        for shard in arrays[name].addressable_shards:
            outer, inner = shard.index[: len(place)], shard.index[len(place) :]
            first = [part.start or 0 for part in outer]
            at = tuple(i - start for i, start in zip(place, first))
            got = np.asarray(shard.data)
            if all(0 <= i < size for i, size in zip(at, got.shape)):
                assert np.array_equal(got[at], want[inner]), (name, shard.index)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={DEVICES_PER_PROCESS}"
    )
    main(pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:]))
