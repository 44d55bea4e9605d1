"""The moves of rows, compiled for an H100 that need not be present: a thread loads and
stores each row by accesses of 16 bytes.

    python -m tests.kernels.test_permute_hopper_code

compiles all cases, and prints the bytes of the accesses as JSON.
"""

import collections
import functools
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_SEC = 600
CASES = [
    *(("bfloat16", choices, 4096, 2048) for choices in (1, 2, 3, 8, 10)),
    ("float16", 8, 4096, 2048),
    ("float32", 8, 4096, 2048),
    ("bfloat16", 8, 4096, 1024),
    ("bfloat16", 3, 4099, 7168),
]
"""Dtype, choices per token, tokens, and width. A width of 1024 is one piece. 4096
tokens fill all blocks, so that no store depends on a condition; 4099 do not."""
LOCATION = re.compile(r"\.loc\s+\d+ (\d+)")
ACCESS = re.compile(r"\b(ld|st)\.global(?:\.v(\d))?\.[bfsu](\d+)\s")


@pytest.mark.long
@pytest.mark.aot
def test_rows_are_loaded_and_stored_by_accesses_of_16_bytes():
    names = ("XLA_FLAGS", "PJRT_NPROC")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_permute_hopper_code"],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key not in names},
        capture_output=True,
        text=True,
        timeout=LIMIT_SEC,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    expected = {}
    for case in CASES:
        _, choices, *_ = case
        sums = max(1, 8 // choices)
        expected |= {
            f"take {case}": {"ld 16": 8, "st 16": 8},
            f"weighted_sum {case}": {"ld 16": sums * choices, "st 16": sums},
            f"combine_backward {case}": {"ld 16": 8, "st 16": 4},
        }
    assert json.loads(ended.stdout) == expected


def main() -> None:
    """Print the number of accesses to rows by case, then by kind and bytes."""
    from moejax.perf import target
    from tools.compiled import wheels

    h100 = target.load("h100")
    wheels.put_on_path()
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    from moejax.kernels.permute import hopper

    found = {}
    for case in CASES:
        dtype, choices, tokens, d = case
        rows = tokens * choices
        x_nd, y_md = (jax.ShapeDtypeStruct((n, d), dtype) for n in (tokens, rows))
        gate_nk = jax.ShapeDtypeStruct((tokens, choices), jnp.float32)
        positions_nk = jax.ShapeDtypeStruct((tokens, choices), jnp.int32)
        assignment_m = jax.ShapeDtypeStruct((rows,), jnp.int32)
        moves = {
            hopper.take: (x_nd, assignment_m),
            hopper.weighted_sum: (y_md, gate_nk, positions_nk),
            hopper.combine_backward: (x_nd, y_md, gate_nk, positions_nk, assignment_m),
        }
        for move, arrays in moves.items():
            ptx = compile_to_ptx(move, arrays, h100)
            found[f"{move.__name__} {case}"] = count_accesses(ptx)
    print(json.dumps(found))


def compile_to_ptx(move, arrays, gpu) -> str:
    """Return the PTX of a function with one kernel."""
    import jax
    from jax.sharding import SingleDeviceSharding, use_abstract_mesh

    from tools.compiled.compile import abstract_gpu, own_compilation, target_devices

    on_gpu = SingleDeviceSharding(target_devices(gpu, 1)[0])
    arrays = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=on_gpu) for a in arrays]
    with own_compilation(), tempfile.TemporaryDirectory() as folder:
        os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": folder}
        with use_abstract_mesh(abstract_gpu(gpu)):
            traced = jax.jit(move).trace(*arrays)
            lowered = traced.lower(lowering_platforms=("cuda",))
        lowered.compile()
        (path,) = pathlib.Path(folder).glob("*.ptx")
        return path.read_text()


def count_accesses(ptx: str) -> dict[str, int]:
    """Return the number of accesses to global memory that `_load` and `_store` make, by
    kind and bytes. The PTX says which line of the kernel's file an instruction is
    from."""
    lines, line, counts = row_lines(), 0, collections.Counter()
    for text in ptx.splitlines():
        if location := LOCATION.search(text):
            line = int(location[1])
        elif line in lines and (access := ACCESS.search(text)):
            kind, values, bits = access.groups()
            counts[f"{kind} {int(values or 1) * int(bits) // 8}"] += 1
    return dict(counts)


@functools.cache
def row_lines() -> set[int]:
    """Return the numbers of the lines that load and store rows, not numbers."""
    from moejax.kernels.permute import hopper

    lines = set()
    for function in (hopper._load, hopper._store):
        text, first = inspect.getsourcelines(function)
        lines.update(range(first, first + len(text)))
    return lines


if __name__ == "__main__":
    main()
