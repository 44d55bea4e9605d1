"""Compile the train step of a configuration for GPUs that are not here.

XLA compiles on the CPU for the described devices. It is told to write down which buffer
has which place in memory, and when, to a temporary folder.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from moejax.config import Config
from moejax.perf.target import Target
from tools.compiled import wheels
from tools.compiled.cudnn_checks import of_target


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A train step compiled for a target, and what XLA wrote about it."""

    run: Any
    """Resolved run on a mesh of the target's devices."""
    text: str
    """Scheduled HLO of the program of one device, in JAX's short form."""
    dumped_text: str
    """The same as XLA writes it, with the names that are in the two texts below."""
    buffer_assignment: str
    """XLA's text of which value lies where in memory."""
    live_range: str
    """XLA's text of when each value is alive."""
    peak_bytes: int
    """Device memory that the program needs, its arguments and the gaps between buffers
    included (train.step.compiled.device_bytes)."""
    temp_bytes: int
    weight_shapes: frozenset[tuple[int, ...]]
    """Shapes of weights on one device (`shapes_of_weights`)."""
    predicted_bytes: dict[str, int]
    """Peak by kind as `--dry_run` predicts it, without a compiler."""
    workspace_bytes: int
    """Workspace of cuDNN's attention, which is among the predicted activations. XLA
    counts 0, because cuDNN is not here to be asked."""
    compile_sec: float


def check_mesh(cfg: Config, num_devices: int, num_nodes: int) -> None:
    """Raise ValueError unless the nodes have as many devices as the mesh."""
    if num_devices < 1 or num_nodes < 1:
        raise ValueError(
            f"--devices={num_devices} and --nodes={num_nodes} must be 1 or more"
        )
    needed, here = cfg.mesh.num_devices, num_devices * num_nodes
    if needed != here:
        raise ValueError(
            f"mesh {cfg.mesh} has {needed} devices, and {num_nodes} node(s) of "
            f"{num_devices} have {here}: change --devices, --nodes or Mesh"
        )


def compile_step(
    cfg: Config,
    target: Target,
    num_devices: int,
    num_nodes: int = 1,
    keep: pathlib.Path | None = None,
) -> CompiledStep:
    """Return the train step compiled for `num_nodes` nodes of `num_devices` GPUs each.

    XLA's own files go to the folder `keep`, or are deleted. Raises ValueError where the
    plugin is missing, the mesh does not fit the devices, or the compiler refuses the
    target. It must be called before JAX starts a backend.
    """
    check_mesh(cfg, num_devices, num_nodes)
    wheels.put_on_path()
    os.environ["JAX_PLATFORMS"] = "cpu"
    with own_compilation(), _folder(keep) as folder:
        return _compile(cfg, target, (num_devices, num_nodes), folder)


@contextlib.contextmanager
def own_compilation():
    """Let XLA compile the whole program, with all optimizations, and restore JAX's
    settings afterwards.

    A program from the cache would come without its files. Tests of moejax disable
    optimizations, and XLA would then compile another program.
    """
    import jax

    names = ("jax_enable_compilation_cache", "jax_disable_most_optimizations")
    before = {name: jax.config.values[name] for name in names}
    try:
        for name in names:
            jax.config.update(name, False)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _compile(cfg, target, sizes, folder) -> CompiledStep:
    from moejax.axes import make_mesh
    from moejax.kernels.attention.cudnn import workspace_bytes
    from moejax.perf.cluster import nodes_of
    from moejax.resolve.kernels import attention_arrays
    from moejax.resolve.memory import step_memory
    from moejax.resolve.resolved import resolve
    from train.launch.program import usable_bytes
    from train.step.compiled import device_bytes, make_model, trace_train_step
    from train.step.gpu_options import compiler_options
    from train.step.state import abstract_state, bytes_per_device

    devices = target_devices(target, *sizes)
    with of_target(target):
        usable = usable_bytes(target.memory_bytes)
        cluster = nodes_of(target, cfg.mesh.num_devices)
        run = resolve(cfg, make_mesh(cfg.mesh, devices), usable, cluster)
        context = make_model(run)
        lowered = trace_train_step(context).lower()
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    options |= compiler_options("gpu")
    begin = time.perf_counter()
    with _refused(target):
        compiled = lowered.compile(compiler_options=options)
    compile_sec = time.perf_counter() - begin
    stats = compiled.memory_analysis()
    state = abstract_state(run, context.optimizer, context.layout.store)
    attention = run.kernels["attention"].value
    held = bytes_per_device(state, cfg.optimizer)
    workspace = workspace_bytes(attention_arrays(cfg)) if attention == "cudnn" else 0
    return CompiledStep(
        run=run,
        text=compiled.as_text(),
        dumped_text=_dumped(folder, "gpu_after_optimizations.txt"),
        buffer_assignment=_dumped(folder, "optimizations-buffer-assignment.txt"),
        live_range=_dumped(folder, "optimizations-live-range.txt"),
        peak_bytes=device_bytes(stats),
        temp_bytes=stats.temp_size_in_bytes,
        weight_shapes=shapes_of_weights(context, state.params),
        predicted_bytes=step_memory(run.cfg, run.layout, held, attention),
        workspace_bytes=workspace,
        compile_sec=compile_sec,
    )


def target_devices(target: Target, num_devices: int, num_nodes: int = 1) -> list:
    """Return the devices of a topology: as many partitions, joined by the slower
    network, as there are nodes; one host each."""
    from jax.experimental import topologies

    with _refused(target):
        return topologies.get_topology_desc(
            platform="cuda",
            target_config=target.proto(),
            topology=f"{num_nodes}x1x{num_devices}",
        ).devices


@contextlib.contextmanager
def _refused(target: Target) -> Iterator[None]:
    """Raise ValueError, in one line, where XLA refuses a target."""
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        line = str(error).partition("\n")[0]
        raise ValueError(f"XLA refuses target {target.name!r}: {line}") from None


def shapes_of_weights(context, params) -> frozenset[tuple[int, ...]]:
    """Return the shapes that master parameters and weights made from them have on one
    device, in the form of `plain_shape`.

    They are: a parameter's part, a parameter whole, and slots with gate and up side by
    side, all of them for all layers and for one.
    """
    import jax

    shapes = set()
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        is_stacked = path[0].key in ("prefix", "cycles")
        for shape in (leaf.shape, leaf.sharding.shard_shape(leaf.shape)):
            shapes |= {shape, shape[1:]} if is_stacked else {shape}
    cfg, num_slots = context.cfg, context.layout.slots_per_device
    d, f = cfg.model.d_model, cfg.moe.d_expert
    slots = {(num_slots, d, 2, f), (num_slots, d, 2 * f), (num_slots, f, d)}
    shapes |= slots | {(cfg.model.num_moe_layers, *shape) for shape in slots}
    plain = {plain_shape(shape) for shape in shapes}
    return frozenset(shape for shape in plain if len(shape) > 1)


def plain_shape(shape) -> tuple[int, ...]:
    """Return a shape without dims of 1, sorted: the compiler transposes."""
    return tuple(sorted(size for size in shape if size != 1))


def _dumped(folder: pathlib.Path, suffix: str) -> str:
    """Return the text of the step's file that ends in `suffix`. If XLA wrote other
    programs as well, the step is the largest."""
    paths = [path for path in folder.iterdir() if path.name.endswith(suffix)]
    if not paths:
        raise ValueError(f"XLA wrote no file *{suffix}: its options have changed")
    largest = max(paths, key=lambda path: path.stat().st_size)
    return largest.read_text(encoding="utf-8")


@contextlib.contextmanager
def _folder(keep: pathlib.Path | None) -> Iterator[pathlib.Path]:
    """Give the folder of XLA's files, and delete it unless the user keeps it."""
    if keep is not None:
        if keep.exists() and not keep.is_dir():
            raise ValueError(f"--keep={keep}: not a folder")
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise ValueError(f"--keep={keep}: the folder is not empty")
        yield keep
        return
    folder = pathlib.Path(tempfile.mkdtemp(prefix="aot-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def abstract_gpu(target: Target):
    """Return the abstract mesh of one GPU of a target, under which kernels lower."""
    from jax.sharding import AbstractDevice, AbstractMesh

    device = AbstractDevice(target.name, num_cores=target.num_cores, platform="gpu")
    return AbstractMesh((), (), abstract_device=device)
