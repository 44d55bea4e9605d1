"""Let the Mosaic GPU interpreter carry out multicast copies of clusters of blocks.

The interpreter of JAX takes such a copy for a plain one, of each block for itself. Here
each block copies its part of the rows, as on a GPU, to the slots of all blocks of its
cluster. So values are wrong if the blocks do not ask for the same array, and the race
detector sees writes into another block's slots. Every part arrives at the barrier of
the block that it lands in, so a copy counts as many arrivals as there are blocks; a GPU
counts bytes instead.
"""

import dataclasses
import time

from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret

from moejax.kernels.grouped_dot.hopper import ring

MAX_WAIT_SEC = 10


def simulate_multicast(monkeypatch) -> None:
    """Patch the interpreter, and the number of arrivals of the barriers of a ring. Only
    kernels that are traced afterwards are different."""
    interpreter = jaxpr_interpret.JaxprInterpreter
    plain, barriers = interpreter._interpret_copy_gmem_to_smem_p, ring.barriers_of_tiles

    def interpret(self, eqn, token, get_invals):
        with monkeypatch.context() as patch:
            if eqn.params["collective_axes"]:
                patch.setattr(gpu_callbacks, "copy_gmem_to_smem", _multicast)
            return plain(self, eqn, token, get_invals)

    def of_cluster(tiles, copies):
        return barriers(tiles, copies + tiles.cluster - 1)

    monkeypatch.setattr(interpreter, "_interpret_copy_gmem_to_smem_p", interpret)
    monkeypatch.setattr(ring, "barriers_of_tiles", of_cluster)


@gpu_callbacks.fail_on_exception
def _multicast(*, token, mesh_location, thread, source_info=None, **arrays):
    """Copy this block's part of an array to the slots of all blocks of its cluster."""
    memory = gpu_callbacks._get_shared_memory()
    keys = {
        name: gpu_callbacks.HostAllocationKey.from_array(
            arrays[f"{name}_allocation_key_as_array"]
        )
        for name in ("src", "dst", "barrier")
    }
    blocks = memory.num_blocks_per_cluster
    part = {
        name: _part(
            memory.access(keys[name], _indices(arrays[f"{name}_transforms"])),
            thread.block_id,
            blocks,
        )
        for name in ("src", "dst")
    }
    for block in range(blocks):
        dst, barrier = (
            dataclasses.replace(keys[name], block_id=block)
            for name in ("dst", "barrier")
        )
        _await_block(memory, dst, barrier)
        clock = memory.incr_clock(thread) if memory.detect_races else None
        task = gpu_callbacks.AsyncCopyGmemToSmemTask(
            mesh_location=mesh_location,
            thread=thread,
            src_allocation_key=keys["src"],
            src_access=part["src"],
            dst_allocation_key=dst,
            dst_access=part["dst"],
            barrier_allocation_key=barrier,
            source_info=source_info,
            clock=clock,
        )
        memory.execute_async_task(task)
    return token


def _await_block(memory, *keys):
    """Wait until a block has begun: on a GPU all blocks of a cluster begin together.
    Raises AssertionError after a while, for one that has ended."""
    end = time.monotonic() + MAX_WAIT_SEC
    while not all(key in memory.mem for key in keys):
        memory.check_failed()
        assert time.monotonic() < end, "a copy into a block that has ended"
        time.sleep(0.001)


def _indices(transforms):
    return gpu_callbacks.jax.tree.map(
        int, gpu_callbacks._remove_noop_transforms(transforms)
    )


def _part(access, block, blocks):
    """Return the part of an access, cut along its first dim, that a block copies."""
    dim = next(i for i, at in enumerate(access.range) if isinstance(at, slice))
    rows = access.range[dim]
    size = (rows.stop - rows.start) // blocks
    first = rows.start + block * size
    cut = (*access.range[:dim], slice(first, first + size), *access.range[dim + 1 :])
    return dataclasses.replace(access, range=cut)
