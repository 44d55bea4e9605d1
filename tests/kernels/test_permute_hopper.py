"""The Hopper kernels of the permutation beside the cases of test_cases.py: loads and
races, and lowering for CUDA."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from moejax.kernels.permute import hopper
from tests.support.permutations import Sizes, arrays, both_ways, tables

SIZES = Sizes(tokens=5, choices=3, rows=19, d=1024)
"""Sizes that no block divides. A row is two pieces in float32 and one in other
dtypes."""


def random_case(kept, dtype=jnp.float32, seed=0, sizes=SIZES):
    return arrays(dtype, seed, sizes), tables(kept, seed, sizes)


def detect_races(kernel, *args):
    """Run a kernel in the interpreter; return the record of its race detector."""
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        jax.block_until_ready(jax.jit(kernel)(*args))
    return get_races()  # those of the last kernel only


@pytest.mark.parametrize("move", ["take", "weighted_sum", "combine_backward"])
def test_pieces_are_loaded_once_and_blocks_do_not_race(move):
    """Each piece of a row is loaded once for each time that a table names the row."""
    (x_nd, dout_nd, y_md, gate_nk), integers = random_case(0.6)
    positions_nk, assignment_m, source_m = integers
    args, loads_per_name = {
        "take": ((x_nd, source_m), 1),
        "weighted_sum": ((y_md, gate_nk, positions_nk), 1),
        "combine_backward": (
            (dout_nd, y_md, gate_nk, positions_nk, assignment_m),
            2,
        ),
    }[move]
    races = detect_races(getattr(hopper, move), *args)
    assert not races.races_found
    ranges = [rnge for reads in races.reads.values() for _, _, rnge, _ in reads]
    loads = [rnge for rnge in ranges if isinstance(rnge[-1], slice)]
    pieces = SIZES.d // 512
    assert len(loads) == np.sum(assignment_m >= 0) * pieces * loads_per_name


def lower_to_text(dtype, sizes):
    """Lower both directions for two H200s that need not be present; return the text."""
    as_struct = partial(jax.tree.map, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype))
    args = as_struct(random_case(1.0, dtype, sizes=sizes))
    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
    mesh = AbstractMesh((2,), ("expert",), (AxisType.Auto,), abstract_device=h200)
    split = P("expert")
    on_devices = jax.shard_map(
        partial(both_ways, "hopper"), mesh=mesh, in_specs=split, out_specs=split
    )
    with use_abstract_mesh(mesh):
        traced = jax.jit(on_devices).trace(*args)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("choices", "dtype"),
    [
        (1, jnp.bfloat16),
        (10, jnp.bfloat16),
        (8, jnp.float32),
    ],
)
def test_each_move_is_one_kernel_for_cuda(choices, dtype):
    text = lower_to_text(dtype, Sizes(tokens=66, choices=choices, rows=800, d=7168))
    assert re.findall(r"custom_call @(\w+)", text) == ["mosaic_gpu_v2"] * 6
    assert "scatter" not in text


@pytest.mark.parametrize(
    ("dtype", "d", "why"),
    [
        (jnp.int8, 2048, "rows of int8 are not moved, only bfloat16, float16, float32"),
        (jnp.bfloat16, 1536, "d=1536 must be a multiple of 1024 in bfloat16: .* bytes"),
        (jnp.float32, 768, "d=768 must be a multiple of 512 in float32: .* bytes"),
    ],
)
def test_declines_rows_that_it_cannot_move(dtype, d, why):
    sizes = SIZES._replace(d=d)
    assert re.search(why, hopper.declines(dtype, d))
    with pytest.raises(NotImplementedError, match=f"{why}.*: use implementation='xla'"):
        hopper.take(jnp.zeros((sizes.tokens, d), dtype), tables(1.0, sizes=sizes)[2])
