"""The machine of a bring-up: devices, driver and modules, found out in a process that
ends, so that this one never holds a GPU.

    python -m tools.stages.machine      prints the devices that JAX sees, as JSON
"""

import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys

from train.launch.agreement import LIBRARIES
from train.messages import one_line

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
MIN_DRIVER = 580
"""First major version of the Linux driver for CUDA 13, of NVIDIA's CUDA Toolkit 13
Release Notes, table "CUDA Toolkit and Minimum Required Driver Version"."""
PLUGIN = "jax-cuda13-plugin"
PROBE_SEC = 180.0
DISTRIBUTIONS = {
    "gin": "gin-config",
    "orbax.checkpoint": "orbax-checkpoint",
    "jax_plugins.xla_cuda13": "jax-cuda13-plugin",
    "yaml": "PyYAML",
}
"""Names of the distributions whose modules have other names."""


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices that JAX sees."""

    platform: str
    kind: str
    count: int
    capability: str
    """CUDA compute capability, '' for a CPU."""
    memory_bytes: int | None


def find_devices() -> Devices:
    """Return the devices of this machine. Raises OSError, one line, if JAX cannot say
    within PROBE_SEC."""
    words = [sys.executable, "-m", "tools.stages.machine"]
    try:
        done = subprocess.run(
            words,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=PROBE_SEC,
        )
    except subprocess.TimeoutExpired:
        raise OSError(
            f"JAX did not find its devices in {PROBE_SEC:.0f} s: look at nvidia-smi "
            "and dmesg; tools/bringup.py --dry runs without a GPU"
        ) from None
    if done.returncode:
        text = one_line(done.stderr.strip().split("\n")[-1])
        raise OSError(
            f"JAX cannot start its devices ({text}): tools/bringup.py --dry runs "
            "without a GPU"
        )
    return Devices(**json.loads(done.stdout.splitlines()[-1]))


def find_driver() -> str | None:
    """Return the version of the NVIDIA driver, or None without one."""
    path = pathlib.Path("/proc/driver/nvidia/version")
    text = path.read_text() if path.is_file() else ""
    if match := re.search(r"Kernel Module.*?\s(\d+\.\d+[\d.]*)", text):
        return match[1]
    if smi := shutil.which("nvidia-smi"):
        words = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if match := re.match(r"\d+\.\d+[\d.]*", done.stdout):
            return match[0]
    return None


def require_driver(version: str | None) -> None:
    """Raise ValueError for a driver that is too old for CUDA 13."""
    if version is None or PLUGIN not in versions():
        return
    if int(version.split(".")[0]) < MIN_DRIVER:
        raise ValueError(
            f"the NVIDIA driver is {version}, and CUDA 13 needs {MIN_DRIVER} or later "
            "(CUDA Toolkit 13 Release Notes, minimum required driver): update it; "
            "until then nothing runs on this GPU, and --dry runs without it"
        )


def require_gpu(devices: Devices) -> None:
    """Raise ValueError if JAX sees no GPU."""
    if devices.platform != "gpu":
        raise ValueError(
            f"there is no GPU here that JAX sees, only {devices.kind}: every stage "
            "measures one; without it `python tools/bringup.py --dry` runs all of "
            "them at toy size"
        )


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that are here."""
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in (*LIBRARIES, "torch", "tokamax", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def code_hash() -> str:
    """Return a hash of the source files that a bring-up runs."""
    digest = hashlib.sha256()
    for room in ("moejax", "train", "tools"):
        for path in sorted((ROOT / room).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def missing(modules: tuple[str, ...]) -> list[str]:
    """Return the modules that cannot be imported here."""
    return [name for name in modules if not _is_here(name)]


def _is_here(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def wanted(module: str) -> str:
    """Return the distribution of a module with the version of constraints.txt:
    'gin-config==0.5.0' for 'gin'."""
    name = DISTRIBUTIONS.get(module, module)
    for line in CONSTRAINTS.read_text().splitlines():
        own, _, version = line.partition("==")
        if _plain(own) == _plain(name):
            return f"{own}=={version}"
    return name


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _print_devices() -> None:
    import jax

    first = jax.devices()[0]
    stats = first.memory_stats() or {}
    devices = Devices(
        platform=first.platform,
        kind=first.device_kind,
        count=jax.device_count(),
        capability=str(getattr(first, "compute_capability", "")),
        memory_bytes=stats.get("bytes_limit"),
    )
    print(json.dumps(dataclasses.asdict(devices)))


if __name__ == "__main__":
    _print_devices()
