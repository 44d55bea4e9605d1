"""Descriptions of the GPUs that a step is compiled for, one TOML file each.

`targets/` has those that ship; a user's own file has the same fields. XLA takes a
description as the text of a protocol buffer, GpuTargetConfigProto.
"""

import dataclasses
import math
import pathlib

from moejax.perf import descriptions
from moejax.perf.rates import Rates

FOLDER = pathlib.Path(__file__).parent / "targets"

CUDA = (13, 0)
"""Version of CUDA for whose driver the step is compiled."""
CUDNN = (9, 28, 0)
"""Version of cuDNN at which the step is compiled: that of constraints.txt."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU as XLA sees it, with stated rates."""

    name: str
    """Kind of the device, such as 'NVIDIA H100 80GB HBM3'."""
    compute_capability: str
    """CUDA compute capability of the GPU, such as '9.0'."""
    num_cores: int
    """Number of streaming multiprocessors."""
    memory_bytes: int
    """Device memory that CUDA reports."""
    memory_bytes_per_sec: float
    """Peak bandwidth of the device memory, for XLA's own choices."""
    l2_bytes: int
    clock_ghz: float
    fpus_per_core: int
    threads_per_core: int
    registers_per_core: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    """Largest shared memory of a block that asks for it."""
    num_nvlinks: int
    pcie_bytes_per_sec: float
    rates: Rates

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor compute capability."""
        major, minor = self.compute_capability.split(".")
        return int(major), int(minor)

    def proto(self) -> str:
        """Return the text of the GpuTargetConfigProto that describes this GPU."""
        major, minor = self.capability
        blocks = [
            (f"block_dim_limit_{axis}", 2**31 - 1 if axis == "x" else 2**16 - 1)
            for axis in "xyz"
        ]
        threads = zip(
            ("thread_dim_limit_x", "thread_dim_limit_y", "thread_dim_limit_z"),
            (1024, 1024, 64),
        )
        fields = [
            ("threads_per_block_limit", 1024),
            ("threads_per_warp", 32),
            ("shared_memory_per_block", 48 * 1024),
            ("shared_memory_per_block_optin", self.shared_bytes_per_block),
            ("shared_memory_per_core", self.shared_bytes_per_core),
            ("threads_per_core_limit", self.threads_per_core),
            ("core_count", self.num_cores),
            ("fpus_per_core", self.fpus_per_core),
            ("memory_bandwidth", int(self.memory_bytes_per_sec)),
            ("l2_cache_size", self.l2_bytes),
            ("clock_rate_ghz", self.clock_ghz),
            ("device_memory_size", self.memory_bytes),
            ("registers_per_core_limit", self.registers_per_core),
            ("registers_per_block_limit", self.registers_per_core),
            ("pcie_bandwidth", int(self.pcie_bytes_per_sec)),
            *blocks,
            *threads,
        ]
        lines = "\n".join(f"  {name}: {value}" for name, value in fields)
        return (
            "gpu_device_info {\n"
            f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n"
            f"  device_interconnect_info {{ active_links: {self.num_nvlinks} }}\n"
            f"{lines}\n"
            f'  name: "{self.name}"\n'
            "}\n"
            'platform_name: "CUDA"\n'
            f"dnn_version_info {_version(*CUDNN)}\n"
            f"runtime_version {_version(*CUDA, 0)}\n"
            f'device_description_str: "{self.name}"\n'
        )


def names() -> list[str]:
    """Return the names of the targets that ship."""
    return descriptions.names(FOLDER)


def of_device(kind: str) -> Target | None:
    """Return the target that ships for a kind of device, as jax names it, or None."""
    return next((gpu for gpu in map(load, names()) if gpu.name == kind), None)


def load(name: str) -> Target:
    """Return the target of a name such as 'h100', or of a TOML file of the user's.

    Raises ValueError, in one line, for an unknown name, for a file that cannot be read,
    and for a missing, unknown or wrong field.
    """
    path, _, fields = descriptions.read(FOLDER, name, "target", "h100")
    rates = fields.pop("rates", None)
    if not isinstance(rates, dict):
        raise ValueError(f"{path}: no table [rates]")
    return _make(Target, fields | {"rates": _make(Rates, rates, path)}, path)


def _make(kind, values: dict, path: pathlib.Path):
    """Return an instance of a dataclass from its fields without defaults, each of the
    type that it states."""
    fields = {
        field.name: field.type
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING
    }
    if unknown := sorted(set(values) - set(fields)):
        raise ValueError(f"{path}: unknown field {unknown[0]!r}")
    for name, type_ in fields.items():
        if name not in values:
            raise ValueError(f"{path}: no field {name!r}")
        _check(name, values[name], type_, path)
    return kind(**values)


def _check(name: str, value, type_, path: pathlib.Path) -> None:
    """Raise ValueError unless a value has its field's type, and is above 0 if it is a
    number."""
    allowed = (int, float) if type_ is float else type_
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise ValueError(f"{path}: {name} = {value!r} must be of type {type_.__name__}")
    if type_ in (int, float) and not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{path}: {name} = {value!r} must be above 0")
    parts = value.split(".") if name == "compute_capability" else ["0", "0"]
    if len(parts) != 2 or not all(part.isdecimal() for part in parts):
        raise ValueError(f"{path}: {name} = {value!r} must be like '9.0'")
    if type_ is str and ('"' in value or "\n" in value or "\\" in value):
        raise ValueError(f"{path}: {name} = {value!r} must have no quote or line end")


def _version(major: int, minor: int, patch: int) -> str:
    return f"{{ major: {major} minor: {minor} patch: {patch} }}"
