"""What was measured on a mesh, as JSON, and the cost model that follows from it."""

import dataclasses
import json
import pathlib

from moejax.perf.cost_model import CostModel
from moejax.plan.layout import GROUP_AXES

LINE_KEYS = ("latency_sec", "bytes_per_sec", "r2")
BYTES_PER_MOVED_WEIGHT = 3 * 4
"""A float32 master and two float32 moments."""
LEAVING_SHARE = {
    "all_to_all": lambda w: (w - 1) / w,
    "all_gather": lambda w: (w - 1) / w,
    "reduce_scatter": lambda w: (w - 1) / w,
    "all_reduce": lambda w: 2 * (w - 1) / w,
    "ppermute": lambda w: 1.0,
}
"""Of the larger array's bytes, what leaves a device of a group of w."""


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Straight lines of time over bytes that leave a device, per collective and mesh
    axes, and the speed of the grouped matmul."""

    device_kind: str
    mesh: dict[str, int]
    """Sizes of the axes dc, data, expert and tensor."""
    compute_dtype: str
    collectives: dict[str, dict[str, dict[str, float]]]
    """collectives[name][axes] has latency_sec, bytes_per_sec and r2; axes is one mesh
    axis, or several joined: "expert_tensor"."""
    flops_per_sec: float
    matmul_r2: float
    compile_sec: float
    when: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Calibration":
        """ValueError, one line, unless every field is there and nothing else."""
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"it is damaged, {error}") from error
        names = {field.name for field in dataclasses.fields(cls)}
        found = set(record) if isinstance(record, dict) else set()
        if found != names:
            raise ValueError(
                f"fields missing {sorted(names - found)}, unknown "
                f"{sorted(found - names)}"
            )
        _check_collectives(record["collectives"])
        _check_numbers(record)
        return cls(**record)


def read_calibration(path: str | pathlib.Path) -> Calibration:
    """Of a file that tools/calibrate.py wrote; ValueError, one line, if it is not."""
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
    """ValueError when it was measured on another mesh or kind of device, or in another
    dtype."""
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
    """Of SwiGLU experts: three matrices [d_model, d_expert], 2 FLOPs per weight. Their
    hidden width is split over data until a layer computes, unless data is one of the
    mesh axes of the group.

    `itemsize` is bytes per element in the compute dtype; `other_flops_per_device` the
    forward FLOPs of the rest of a block in one micro-batch.
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
    """The line of a collective over these mesh axes together, each of several devices:
    that of their product ("expert_tensor") where it was measured, else the slowest of
    those of the axes. All groups of the mesh ran at once when it was measured, so a
    link that they share is in it. ValueError, one line, where there is none."""
    lines = calibration.collectives.get(collective, {})
    own = "_".join(axes)
    if own in lines:
        return lines[own]
    for axis in axes:
        if axis not in lines:
            raise ValueError(
                f"the calibration has no {collective} over the {axis!r} axis (it has "
                f"{sorted(lines)}): run tools/calibrate.py on this mesh"
            )
    return min((lines[axis] for axis in axes), key=lambda line: line["bytes_per_sec"])


def leaving_bytes(collective: str, size_bytes: float, num_devices: int) -> float:
    """What leaves each device of a group in one collective. The size is that of the
    larger array on a device: what it sends in an all_to_all, the output of an
    all_gather, the input of a reduce_scatter or all_reduce (a ring's)."""
    return LEAVING_SHARE[collective](num_devices) * size_bytes


def _check_collectives(collectives) -> None:
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
    if not (record["flops_per_sec"] > 0 and record["compile_sec"] >= 0):
        raise ValueError(
            "flops_per_sec must be above 0 and compile_sec at least 0, and they are "
            f"{record['flops_per_sec']} and {record['compile_sec']}"
        )
