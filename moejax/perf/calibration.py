"""Speeds that were measured on a mesh, as JSON."""

import dataclasses
import json
import os
import pathlib

from moejax.plan.layout import ITEMSIZE, Topology

LINE_KEYS = ("latency_sec", "bytes_per_sec", "r2")
"""Keys of a fitted line: seconds = latency_sec + bytes / bytes_per_sec."""
RANGES = {
    "latency_sec": (0.0, 3600.0),
    "bytes_per_sec": (1.0, 1e18),
    "r2": (-1e6, 1.0),
    "flops_per_sec": (1.0, 1e21),
    "matmul_r2": (-1e6, 1.0),
    "compile_sec": (0.0, 1e6),
}
"""Smallest and largest value of each measured number. They are wide: a number outside
was not measured, and would make predicted times infinite."""
MAX_DEVICES = 2**20
MAX_FILE_BYTES = 2**20
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
    that leave a device; there is also the throughput of experts.
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
    """FLOPs of the products of SwiGLU experts, per second of one device in training.
    The rows' way to slots and back, the activation, and the gradients of all are in
    that time."""
    matmul_r2: float
    """Coefficient of determination of the line that gave flops_per_sec."""
    compile_sec: float
    """Time to compile a train step."""
    when: str
    """Date of the measurement, "stated" or "presumed"."""

    @property
    def is_measured(self) -> bool:
        """Whether the speeds were measured, and not stated or presumed
        (moejax/resolve/speeds.py)."""
        return self.when not in ("stated", "presumed")

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
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is damaged, {error}") from error
        names = {field.name for field in dataclasses.fields(cls)}
        keys = set(record) if isinstance(record, dict) else set()
        if keys != names:
            raise ValueError(
                f"fields missing {sorted(names - keys)}, unknown {sorted(keys - names)}"
            )
        _check_words(record)
        _check_mesh(record["mesh"])
        _check_collectives(record["collectives"])
        for name in ("flops_per_sec", "matmul_r2", "compile_sec"):
            _check_number(name, record[name], name)
        return cls(**record)


def read_calibration(path: str | pathlib.Path) -> Calibration:
    """Return the calibration in a file that tools/calibrate.py wrote.

    Raises ValueError with one line if there is none in it.
    """
    try:
        if not os.path.isfile(path):
            raise ValueError("there is no such file")
        if os.path.getsize(path) > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        return Calibration.from_json(pathlib.Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
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


def slower(calibration: Calibration, axis: str, factor: float) -> Calibration:
    """Return the calibration of a mesh on which collectives over an axis, alone or with
    others, are slower by a factor."""

    def changed(axes: str, line: dict[str, float]) -> dict[str, float]:
        rate = line["bytes_per_sec"] / (factor if axis in axes.split("_") else 1.0)
        return line | {"bytes_per_sec": rate}

    collectives = {
        name: {axes: changed(axes, line) for axes, line in lines.items()}
        for name, lines in calibration.collectives.items()
    }
    return dataclasses.replace(calibration, collectives=collectives)


def leaving_bytes(collective: str, size_bytes: float, num_devices: int) -> float:
    """Return the bytes that leave each device of a group in one collective.

    `size_bytes` is the size of the larger array on a device: the buffer that it sends
    in an all_to_all, the output of an all_gather, the input of a reduce_scatter or of a
    ring all_reduce.
    """
    return LEAVING_SHARE[collective](num_devices) * size_bytes


def _check_words(record: dict) -> None:
    """Raise ValueError unless the fields of a calibration that are words are words."""
    for name in ("device_kind", "compute_dtype", "when"):
        word = record[name]
        if not isinstance(word, str) or not word:
            raise ValueError(f"{name} must be a word, and is {_shown(word)}")
    if record["compute_dtype"] not in ITEMSIZE:
        raise ValueError(
            f"compute_dtype must be one of {list(ITEMSIZE)}, and is "
            f"{_shown(record['compute_dtype'])}"
        )


def _check_mesh(mesh) -> None:
    """Raise ValueError unless a mesh has a number of devices along each axis."""
    axes = [field.name for field in dataclasses.fields(Topology)]
    if not isinstance(mesh, dict) or sorted(mesh) != sorted(axes):
        raise ValueError(f"mesh must have the axes {axes}, and is {_shown(mesh)}")
    for axis, size in mesh.items():
        if type(size) is not int or not 1 <= size <= MAX_DEVICES:
            raise ValueError(
                f"mesh must have 1 to {MAX_DEVICES} devices along {axis}, and has "
                f"{_shown(size)}"
            )


def _check_collectives(collectives) -> None:
    """Raise ValueError for an unknown collective or axis, and for a line without its
    keys or with impossible values."""
    if not isinstance(collectives, dict):
        raise ValueError(f"collectives must be a table, and is {_shown(collectives)}")
    known = {field.name for field in dataclasses.fields(Topology)}
    for name, lines in collectives.items():
        if name not in LEAVING_SHARE or not isinstance(lines, dict):
            raise ValueError(
                f"collectives must have tables of lines for some of "
                f"{list(LEAVING_SHARE)}, and has {_shown(name)}: {_shown(lines)}"
            )
        for axes, line in lines.items():
            words = axes.split("_")
            if not known.issuperset(words) or len(set(words)) < len(words):
                raise ValueError(
                    f"{name} has a line over {_shown(axes)}: it must be one of "
                    f"{sorted(known)}, or several joined by '_'"
                )
            if not isinstance(line, dict) or sorted(line) != sorted(LINE_KEYS):
                raise ValueError(
                    f"{name} over {axes!r} must have {list(LINE_KEYS)}, and is "
                    f"{_shown(line)}"
                )
            for key in LINE_KEYS:
                _check_number(key, line[key], f"{key} of {name} over {axes!r}")


def _check_number(name: str, value, where: str) -> None:
    """Raise ValueError unless a number is in its RANGES; NaN is in none."""
    low, high = RANGES[name]
    if type(value) not in (int, float) or not low <= value <= high:
        raise ValueError(
            f"{where} must be a number from {low:g} to {high:g}, and is {_shown(value)}"
        )


def _shown(value) -> str:
    """Return a value as text, cut to 60 characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a huge {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
