"""Build what checkpoint tests need: a small state with every dtype, a directory to save
it in, and a writer that can wait or fail."""

import asyncio
import os
import pathlib
import threading
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from orbax.checkpoint._src.serialization import serialization

from moejax import config
from moejax.axes import make_mesh, sharding
from moejax.plan.layout import Topology
from train.checkpoint.checkpoints import Checkpointer

CFG = config.Checkpoint(keep_last=2, keep_best=0)
META = {"data": {"sha": "ab12", "seed": 3}, "note": "ä", "rate": 0.1, "plan": None}
DISK_FULL = OSError(28, "No space left on device")


class Extra(NamedTuple):
    step: jax.Array
    key: jax.Array
    rest: tuple


def build_mesh(num_devices: int, data: int):
    """Return a mesh of the first devices with `data` of them on the data axis."""
    topology = Topology(data=data, expert=num_devices // data)
    return make_mesh(topology, jax.devices()[:num_devices])


def make_state(mesh, seed: int) -> dict:
    """Return a random state with arrays of every dtype and several shardings.

    Arrays are replicated, split over one mesh axis, and split over two. One is large
    enough for files of its own.
    """
    rng = np.random.default_rng(seed)

    def put(x, *dims):
        return jax.device_put(x, sharding(mesh, *dims))

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    params = {
        "blocks": {"w_lef": put(normal(3, 8, 4000), None, ("data", "expert"), None)},
        "embed_vd": put(normal(64, 16), "expert", "data"),
        "copy_vd": put(normal(64, 16).astype(jnp.bfloat16), "data", None),
        "norm_d": put(normal(16).astype(np.float16)),
    }
    extra = Extra(
        step=put(np.int32(seed)),
        key=put(rng.integers(2**32, size=4, dtype=np.uint32)),
        rest=(put(rng.integers(256, size=(16, 3), dtype=np.uint8), "data", None),),
    )
    mask_e = put(rng.integers(2, size=8).astype(bool), "expert")
    opt = jax.tree.map(lambda x: x * 3, optax.adam(1e-3).init(params))
    opt = jax.tree.map(lambda x: jax.device_put(x, sharding(mesh)), opt)
    return {"params": params, "opt": opt, "extra": extra, "mask_e": mask_e}


def abstract(state):
    """Return the shapes, dtypes and shardings of a state."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def are_same_bits(a, b) -> bool:
    """Return whether two states of one structure agree in dtypes and bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b))
    return all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in pairs
    )


class Disk:
    """A checkpoint directory with its open checkpointers and the lines they log."""

    def __init__(self, directory: pathlib.Path) -> None:
        self.directory = directory
        self.said: list[str] = []
        self._opened: list[Checkpointer] = []

    def open(self, cfg: config.Checkpoint = CFG) -> Checkpointer:
        self._opened.append(Checkpointer(self.directory, cfg, say=self.said.append))
        return self._opened[-1]

    def names(self) -> list[str]:
        return sorted(os.listdir(self.directory))

    def close(self) -> None:
        for checkpointer in self._opened:
            checkpointer.close()


def wait_for_the_writer() -> None:
    """Return when the save in flight has ended, which nobody was told of yet."""
    for thread in threading.enumerate():
        if thread.name == "a save in flight":
            thread.join()


class ArrayWriter:
    """Replacement of Orbax's writer of one array that can wait or fail."""

    fault: Exception | None = None

    def __init__(self) -> None:
        self._write = serialization.async_serialize_from_host
        self.may_write = threading.Event()
        """While it is not set, no array is written."""
        self.may_write.set()

    async def __call__(self, *args, **kwargs):
        await asyncio.sleep(0)
        while not self.may_write.is_set():
            await asyncio.sleep(0.01)
        if self.fault is not None:
            raise self.fault
        return await self._write(*args, **kwargs)
