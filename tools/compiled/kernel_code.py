"""Compile a program of Mosaic GPU kernels for a GPU that is not here, and read what
ptxas and the disassembler say of each kernel.

XLA compiles on the CPU, with the ptxas that is inside of JAX's CUDA plugin. Mosaic GPU
writes what the variables MOSAIC_GPU_DUMP_* ask for to a folder, a file for each kernel:
the remarks of ptxas, PTX, the machine code, and the shared memory.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moejax.perf.target import Target
from tools.compiled import ptxas, sass, wheels
from tools.compiled.compile import own_compilation, target_devices

_WRITTEN = ("PTX", "PTXAS", "SASS_CTRL", "RESOURCES")
_SHARED = re.compile(r"smem_scratch_bytes=(\d+)")


@dataclasses.dataclass(frozen=True)
class KernelCode:
    """Figures of the machine code of one kernel."""

    name: str
    """Name of the kernel, such as grouped_rows."""
    ptxas: ptxas.Registers
    shared_bytes: int
    """Bytes of shared memory of a block, without the barriers in it."""
    sass: sass.Kernel

    def record(self) -> dict[str, Any]:
        """Return the figures as plain numbers by name, for JSON. A loop that the kernel
        does not have is None."""
        remarks, code = self.ptxas._asdict(), self.sass._asdict()
        loops = {name: code.pop(name) for name in ("computing", "copying")}
        return {
            "kernel": self.name,
            "launch_registers": remarks.pop("registers"),
            "shared_bytes": self.shared_bytes,
            **remarks,
            "codes": list(self.ptxas.codes),
            **code,
            **{name: loop and loop._asdict() for name, loop in loops.items()},
        }


def set_up() -> None:
    """Let JAX compile for absent GPUs in this process, and Mosaic GPU disassemble.

    It must be called before JAX starts a backend. Raises ValueError, which says how to
    get them, where the plugin or the disassembler is missing.
    """
    wheels.put_on_path()
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax.experimental.mosaic.gpu  # noqa: F401  it sets the next variable itself

    os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(wheels.CUDA_ROOT)


def compile_kernels(
    function: Callable, arguments: Sequence[Any], target: Target
) -> list[KernelCode]:
    """Return what the kernels of a function compile to, in the order of their names.

    `arguments` are arrays or their shapes. Raises ValueError where XLA or Mosaic GPU
    refuses the program, or where it has no kernel.
    """
    import jax
    from jax.sharding import SingleDeviceSharding, use_abstract_mesh

    sharding = SingleDeviceSharding(target_devices(target, 1)[0])
    shapes = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments
    ]
    with (
        own_compilation(),
        tempfile.TemporaryDirectory(prefix="kernel-code-") as name,
        _written_to(name),
    ):
        with use_abstract_mesh(abstract_gpu(target)):
            traced = jax.jit(function).trace(*shapes)
            lowered = traced.lower(lowering_platforms=("cuda",))
        lowered.compile()
        return _read(pathlib.Path(name))


def abstract_gpu(target: Target):
    """Return the abstract mesh of one GPU of a target, under which kernels lower."""
    from jax.sharding import AbstractDevice, AbstractMesh

    device = AbstractDevice(target.name, num_cores=target.num_cores, platform="gpu")
    return AbstractMesh((), (), abstract_device=device)


def ptxas_version() -> str:
    """Return the version of CUDA that the plugin's ptxas is from, such as '13.0'.
    `set_up` must have been called."""
    from jax_cuda13_plugin import _versions

    version = _versions.cuda_runtime_build_version()
    return f"{version // 1000}.{version % 1000 // 10}"


def _read(folder: pathlib.Path) -> list[KernelCode]:
    """Return the kernels of which Mosaic GPU wrote files to a folder."""
    found = []
    for path in sorted(folder.glob("*.ptxas")):
        files = {end: path.with_suffix(end) for end in (".sass_ctrl", ".resources.txt")}
        for file in files.values():
            if not file.is_file():
                raise ValueError(f"Mosaic GPU wrote no {file.name}: its names changed")
        sass_text, resources = (file.read_text() for file in files.values())
        found.append(
            KernelCode(
                name=re.sub(r"_\d+$", "", path.stem),
                ptxas=ptxas.read(path.read_text()),
                shared_bytes=int(_SHARED.search(resources)[1]),
                sass=sass.read(sass_text),
            )
        )
    if not found:
        raise ValueError(
            "Mosaic GPU wrote no code: the program has no kernel, or this process has "
            "compiled the same kernel before"
        )
    return found


@contextlib.contextmanager
def _written_to(folder: str) -> Iterator[None]:
    """Let Mosaic GPU write what it makes of kernels to a folder."""
    names = {f"MOSAIC_GPU_DUMP_{name}": "1" for name in _WRITTEN}
    names["MOSAIC_GPU_DUMP_TO"] = folder
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
