"""Set up the tests: eight simulated CPU devices, and a compilation cache that git
ignores. With --gpu only the kernels' cases run, on the GPU (tests/support/on_gpu.py).

Tests that a machine cannot run are deselected, and one line says why; there are no
silent skips.
"""

import functools
import gc
import importlib.util
import os
import pathlib
import signal
import sys
import tempfile
from collections.abc import Iterator

from tests.support import on_gpu, xla_flags

ROOT = pathlib.Path(__file__).resolve().parents[1]
TRACE = ROOT.parent / "shared" / "data" / "routing_gpt_e32.npz"
NUM_DEVICES = 8
MAX_MEMORY_AREAS = 30_000
"""Compiled programs take a hundred memory areas each, and Linux gives a process 65,530:
beyond, loading one more program is a segmentation fault."""
LONGEST = (
    "test_steps", "test_runs", "test_balancing", "test_equals_reference", "test_aot",
    "test_cases", "test_from_hf", "test_library", "test_splits_in_layer", "test_greedy",
    "test_replicas", "test_notebooks", "test_mutated_inputs", "test_evaluate",
)  # fmt: skip
"""Files that take 20 seconds or more. They start first: with several workers, one at
the end would run alone."""

# A shell ignores SIGINT in its background processes, and the programs that tests start
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    # Each program that tests start would compile the sources of JAX and of the trainer
    # anew, for two seconds. Folders of sources are left as they are.
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(ROOT / ".cache" / "python")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
if "--gpu" in sys.argv:
    os.environ[on_gpu.VARIABLE] = "interpret" if "--interpret" in sys.argv else "device"
# Workers of pytest-xdist inherit the variable, and do not see the flags.
ON_GPU = on_gpu.where()
if ON_GPU == "device":
    on_gpu.set_up()
else:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Tests compile far longer than they compute. Without LLVM's optimisations they take
    # two thirds of the time. Programs that tests start inherit this. All of XLA's
    # passes run.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if not ON_GPU:
    os.environ["XLA_FLAGS"] = " ".join(
        [
            os.environ.get("XLA_FLAGS", ""),
            f"--xla_force_host_platform_device_count={NUM_DEVICES}",
            *xla_flags.QUICK,
            "--xla_cpu_collective_call_terminate_timeout_seconds=600",
            "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
        ]
    )
os.environ.setdefault("PJRT_NPROC", "32")  # train/launch/program.py says why
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
PREPARED = tempfile.TemporaryDirectory(prefix="prepared-")
os.environ["MOEJAX_CACHE_DIR"] = PREPARED.name
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import pytest  # noqa: E402

if not ON_GPU and len(jax.devices()) != NUM_DEVICES:
    pytest.exit(
        f"the tests need {NUM_DEVICES} simulated CPU devices and see {jax.devices()}: "
        "unset JAX_PLATFORMS, and let nothing import jax before tests/conftest.py",
        returncode=4,
    )

jax.config.update("jax_threefry_partitionable", True)
gc.set_threshold(100000)  # at the default 700 it takes a tenth of the time


def pytest_addoption(parser: pytest.Parser) -> None:
    on_gpu.add_options(parser)
    parser.addoption(
        "--may-lack",
        metavar="MARKS",
        help="marks, with commas between, of the only tests that may be deselected "
        "because this machine cannot run them; .ci/run names them",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if ON_GPU:
        on_gpu.spread(config)


def pytest_sessionstart(session: pytest.Session) -> None:
    if ON_GPU == "device":
        on_gpu.require_gpu(session.config)
    allowed = session.config.option.may_lack
    if allowed is not None and not ON_GPU:
        lacking = _missing().keys() - set(allowed.split(","))
        if lacking:
            whys = "; ".join(f"{mark}: {_missing()[mark]}" for mark in sorted(lacking))
            pytest.exit(f"tests that must run cannot ({whys})", returncode=1)


def pytest_collection_modifyitems(config: pytest.Config, items: list) -> None:
    """Deselect tests that this machine cannot run, and start the longest files
    first."""
    if ON_GPU:
        on_gpu.select(config, items)
        return
    for mark in _missing():
        out = [item for item in items if item.get_closest_marker(mark)]
        if out:
            config.hook.pytest_deselected(items=out)
            items[:] = [item for item in items if item not in out]
    items.sort(key=lambda item: item.path.stem not in LONGEST)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()  # modules and tests stay: no collection goes through them


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    """Say which tests this machine cannot run. Workers of xdist print nothing."""
    if ON_GPU:
        terminalreporter.write_line(on_gpu.summary(config))
        return
    for mark, why in _missing().items():
        terminalreporter.write_line(f"not run: tests marked {mark!r} ({why})")


@functools.cache
def _missing() -> dict[str, str]:
    """Return the marks of tests that this machine cannot run, with the reasons."""
    from tests.support.browser import missing_chromium
    from tools.bench.grouped_dot_peers import missing_tokamax
    from tools.compiled import wheels
    from train.logs.trackers import missing_trackers

    missing = {}
    if os.geteuid() != 0:
        missing["root"] = "not root: nothing can be mounted"
    if not TRACE.is_file():
        missing["trace"] = f"no {TRACE.name} in ../shared/data"
    if why := wheels.missing():
        missing["aot"] = why
    if why := missing_tokamax():
        missing["peers"] = why
    if importlib.util.find_spec("mkdocs") is None:
        missing["docs"] = "no mkdocs: make setup EXTRAS=train,dev,docs"
    if why := missing_trackers():
        missing["trackers"] = why
    if why := missing_chromium():
        missing["browser"] = why
    return missing


@pytest.fixture(scope="session")
def repo() -> pathlib.Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Drop compiled programs after a file of tests, if they have become many: those of
    JAX, and those that tests keep with functools.cache."""
    yield
    areas = pathlib.Path("/proc/self/maps")
    if areas.is_file() and areas.read_bytes().count(b"\n") > MAX_MEMORY_AREAS:
        for each in gc.get_objects():
            if isinstance(each, functools._lru_cache_wrapper) and (
                each.__module__.startswith("tests.")
            ):
                each.cache_clear()
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def policies_of_tests(monkeypatch) -> None:
    """Add the small policies of balanced_run to POLICIES."""
    from moejax.balance.policies import POLICIES
    from tests.support.balanced_run import POLICIES_OF_TESTS

    for name, policy in POLICIES_OF_TESTS.items():
        monkeypatch.setitem(POLICIES, name, policy)


@pytest.fixture(scope="session")
def trace() -> pathlib.Path:
    """The file of a recorded routing; tests that use it are marked `trace`."""
    return TRACE


@pytest.fixture(scope="session")
def published() -> pathlib.Path:
    """The folder of tiny published models."""
    return ROOT / "tests" / "golden" / "hf"


@pytest.fixture
def doubles(monkeypatch) -> Iterator[str]:
    """Compute in float64, also where code asks for float32, as the router does."""
    monkeypatch.setattr(jnp, "float32", jnp.float64)
    with jax.enable_x64(True):
        yield "float64"
