"""Speeds that were measured on a mesh, as JSON, and the cost model that follows."""

import dataclasses
import json
import pathlib

from moejax.perf.cost_model import CostModel
from moejax.plan.layout import GROUP_AXES

LINE_KEYS = ("latency_sec", "bytes_per_sec", "r2")
"""Keys of a fitted line: seconds = latency_sec + bytes / bytes_per_sec."""
BYTES_PER_MOVED_WEIGHT = 3 * 4
"""Bytes that move with a weight to another owner: a float32 master parameter and two
float32 moments."""
LEAVING_SHARE = {
    "all_to_all": lambda w: (w - 1) / w,
    "all_gather": lambda w: (w - 1) / w,
    "reduce_scatter": lambda w: (w - 1) / w,
    "all_reduce": lambda w: 2 * (w - 1) / w,
    "ppermute": lambda w: 1.0,
}
"""Share of the larger array's bytes that leaves a device, by collective, in a group of
w devices."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Measured speeds of a mesh.

    For each collective and mesh axis there is a straight line of seconds over the bytes
    that leave a device; there is also the throughput of the grouped matmul.
    """

    device_kind: str
    """Kind of the devices, as jax names it."""
    mesh: dict[str, int]
    """Number of devices along the axes dc, data, expert and tensor."""
    compute_dtype: str
    """Number format of the measured matmuls and collectives."""
    collectives: dict[str, dict[str, dict[str, float]]]
    """Lines by collective and axes: collectives[name][axes] has latency_sec,
    bytes_per_sec and r2; axes is one mesh axis, or several joined, "expert_tensor"."""
    flops_per_sec: float
    """Throughput of the grouped matmul on one device."""
    matmul_r2: float
    """Coefficient of determination of the line that gave flops_per_sec."""
    compile_sec: float
    """Time to compile a train step."""
    when: str
    """Date of the measurement, or "presumed"."""

    @property
    def is_presumed(self) -> bool:
        """Whether nothing was measured: the speeds are those of `presumed` in
        moejax/resolve/speeds.py."""
        return self.when == "presumed"

    def to_json(self) -> str:
        """Return the calibration as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Calibration":
        """Return the calibration that `to_json` wrote.

        Raises ValueError with one line unless every field is there and nothing else.
        """
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"it is damaged, {error}") from error
        names = {field.name for field in dataclasses.fields(cls)}
        keys = set(record) if isinstance(record, dict) else set()
        if keys != names:
            raise ValueError(
                f"fields missing {sorted(names - keys)}, unknown {sorted(keys - names)}"
            )
        _check_collectives(record["collectives"])
        _check_numbers(record)
        return cls(**record)


def read_calibration(path: str | pathlib.Path) -> Calibration:
    """Return the calibration in a file that tools/calibrate.py wrote.

    Raises ValueError with one line if there is none in it.
    """
    try:
        return Calibration.from_json(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(
            f"cannot use {path} as a calibration: {error}: run tools/calibrate.py"
        ) from error


def check(
    calibration: Calibration,
    mesh_sizes: dict[str, int],
    device_kind: str,
    compute_dtype: str,
) -> None:
    """Raise ValueError if the calibration was measured on another mesh or kind of
    device, or in another dtype."""
    if calibration.compute_dtype != compute_dtype:
        raise ValueError(
            f"the calibration was measured in {calibration.compute_dtype}, and "
            f"Model.compute_dtype is {compute_dtype}: run tools/calibrate.py with it"
        )
    if calibration.device_kind != device_kind:
        raise ValueError(
            f"the calibration was measured on {calibration.device_kind!r}, and the "
            f"devices are {device_kind!r}: run tools/calibrate.py here"
        )
    if calibration.mesh != mesh_sizes:
        raise ValueError(
            f"the calibration was measured on mesh {calibration.mesh}, and this one is "
            f"{mesh_sizes}: run tools/calibrate.py on it"
        )


def cost_model(
    calibration: Calibration,
    *,
    d_model: int,
    d_expert: int,
    itemsize: int,
    micro_batches: int,
    other_flops_per_device: float,
    remat: str = "none",
    group: tuple[str, ...] = GROUP_AXES["expert"],
) -> CostModel:
    """Return the cost model of SwiGLU experts at the calibration's speeds.

    An expert has three matrices [d_model, d_expert] and 2 FLOPs per weight and row. Its
    hidden width is split over data until a layer computes, unless data is one of the
    mesh axes of the group. `itemsize` is bytes per element in the compute dtype, and
    `other_flops_per_device` the forward FLOPs of the rest of a block on one device in
    one micro-batch. Raises ValueError where the calibration lacks a line.
    """
    data = 1 if "data" in group else calibration.mesh["data"]
    weights = 3 * d_model * d_expert
    gather_sec = 0.0
    if data > 1:
        gather = find_line(calibration, "all_gather", ("data",))
        share_bytes = weights * itemsize / data
        gather_sec = (data - 1) * share_bytes / gather["bytes_per_sec"]
    line = {"latency_sec": 0.0, "bytes_per_sec": float("inf")}
    several = tuple(axis for axis in group if calibration.mesh[axis] > 1)
    if several:
        line = find_line(calibration, "all_to_all", several)
    return CostModel(
        flops_per_row=2 * weights,
        bytes_per_row=d_model * itemsize,
        bytes_per_expert=weights * itemsize / data,
        bytes_per_move=weights * BYTES_PER_MOVED_WEIGHT / data,
        flops_per_sec=calibration.flops_per_sec,
        bytes_per_sec=line["bytes_per_sec"],
        latency_sec=line["latency_sec"],
        other_sec=other_flops_per_device / calibration.flops_per_sec,
        compile_sec=calibration.compile_sec,
        micro_batches=micro_batches,
        gather_sec=gather_sec,
        remat=remat,
    )


def find_line(
    calibration: Calibration, collective: str, axes: tuple[str, ...]
) -> dict[str, float]:
    """Return the line of a collective over these mesh axes together.

    Each axis has several devices. The line is that of their product ("expert_tensor")
    where it was measured, else the one of the single axes with the least bytes_per_sec.
    All groups of the mesh ran at once in the measurement, so that a link that they
    share is accounted for. Raises ValueError with one line where there is none.
    """
    lines = calibration.collectives.get(collective, {})
    product = "_".join(axes)
    if product in lines:
        return lines[product]
    for axis in axes:
        if axis not in lines:
            raise ValueError(
                f"the calibration has no {collective} over the {axis!r} axis (it has "
                f"{sorted(lines)}): run tools/calibrate.py on this mesh"
            )
    return min((lines[axis] for axis in axes), key=lambda line: line["bytes_per_sec"])


def leaving_bytes(collective: str, size_bytes: float, num_devices: int) -> float:
    """Return the bytes that leave each device of a group in one collective.

    `size_bytes` is the size of the larger array on a device: the buffer that it sends
    in an all_to_all, the output of an all_gather, the input of a reduce_scatter or of a
    ring all_reduce.
    """
    return LEAVING_SHARE[collective](num_devices) * size_bytes


def _check_collectives(collectives) -> None:
    """Raise ValueError for a line without its keys or with impossible values."""
    for name, axes in collectives.items():
        for axis, line in axes.items():
            if sorted(line) != sorted(LINE_KEYS):
                raise ValueError(
                    f"{name} over {axis!r} must have {list(LINE_KEYS)}, and has "
                    f"{sorted(line)}"
                )
            if not (line["latency_sec"] >= 0 and line["bytes_per_sec"] > 0):
                raise ValueError(
                    f"{name} over {axis!r} must have latency_sec >= 0 and "
                    f"bytes_per_sec > 0, and has {line}"
                )


def _check_numbers(record: dict) -> None:
    """Raise ValueError for impossible values of flops_per_sec or compile_sec."""
    if not (record["flops_per_sec"] > 0 and record["compile_sec"] >= 0):
        raise ValueError(
            "flops_per_sec must be above 0 and compile_sec at least 0, and they are "
            f"{record['flops_per_sec']} and {record['compile_sec']}"
        )
