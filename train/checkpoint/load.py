"""Load a trained model on any mesh, for evaluation, generation and export.

    source = find_checkpoints(run_dir, params=["Mesh.expert = 2"])
    start(source.cfg)             sets the flags that jax needs; jax is not imported yet
    loaded = load_model(source)

A run may be writing to its directory meanwhile, which is not changed. Optimizer moments
are not read. `find_folder` and `load_folder` do the same for the folder of a published
model, without a run.
"""

import ast
import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moejax.config import Config, Data, Train
from moejax.interop.architecture import CONFIG
from moejax.interop.companions import TOKENIZER, read_text_ids
from moejax.interop.folder import resolve as resolve_path
from moejax.interop.published import read_architecture
from moejax.plan.layout import Topology
from train.checkpoint.identity import FIXED_FIELDS, require_format
from train.checkpoint.record import (
    DamagedCheckpointError,
    has_checkpoint,
    list_steps,
    read_record,
    read_record_on_all,
)
from train.config.from_hf import KEPT, with_kept_tokenizer
from train.config.names import KINDS, PARTS, check_name, config_from_record, convert
from train.launch.processes import is_first
from train.launch.program import say_loudly

if TYPE_CHECKING:
    import jax

    from moejax.moe.types import Placement
    from moejax.resolve.resolved import Resolved

MESH_DEFAULTS = {
    "schedule": "auto", "expert_shards": None, "domain": (1, 1), "compression": None,
}  # fmt: skip
"""Fields of Dispatch that fit only the mesh of their run, and their values on another
mesh."""
MAX_WINDOW = 2048
"""Data.seq_len of a published model at most, in tokens: the windows of an
evaluation."""


@dataclasses.dataclass(frozen=True)
class CheckpointSource:
    """Checkpoints of a run, and the configuration to load one with."""

    directory: pathlib.Path
    steps: tuple[int, ...]
    """Steps of the checkpoints to try, in order."""
    cfg: Config
    """Configuration of the run, changed by the bindings that the user gave. Its devices
    are simulated or those of this machine."""
    is_mesh_given: bool
    """Whether the user gave a mesh."""

    @property
    def kept(self) -> pathlib.Path | None:
        """Folder in which the run keeps what belongs to the published model that it
        started from; None if it started from none."""
        folder = self.directory.parent / KEPT
        return folder if folder.is_dir() else None


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A trained model on its devices."""

    run: "Resolved"
    """Configuration of the run, but with a mesh, batch and kernels for this machine."""
    params: Any
    router_bias: Any
    placement: "Placement"
    step: int | None
    """Step of the checkpoint; None for a published folder."""
    meta: dict[str, Any]
    """Meta of the checkpoint: configuration of the run, data identity and plan."""
    published: pathlib.Path | None = None
    """Folder with the config.json and the tokenizer of a published model: the folder
    itself, or the copy of a run that started from one. None: there is none."""

    @property
    def cfg(self) -> Config:
        return self.run.cfg

    @property
    def mesh(self) -> "jax.sharding.Mesh":
        return self.run.mesh


def find_checkpoints(
    run_dir: str | pathlib.Path, step: int | None = None, params: Sequence[str] = ()
) -> CheckpointSource:
    """Find the checkpoints of a run: all of them, newest first, or that of `step`.

    `params` are bindings such as 'Mesh.expert = 2'. Raises a ValueError of one line if
    there is no checkpoint, if no record can be read, or if a binding changes a field
    that decides the parameters.
    """
    directory = pathlib.Path(run_dir).absolute() / "checkpoints"
    saved_steps = list_steps(directory) if directory.is_dir() else []
    if not saved_steps:
        raise ValueError(
            f"{run_dir} has no checkpoints: name the run directory of a run of "
            "train/main.py that has saved one"
        )
    if step is not None and step not in saved_steps:
        names = ", ".join(map(str, sorted(saved_steps)))
        raise ValueError(f"{run_dir} has no checkpoint of step {step}: it has {names}")
    steps = tuple(saved_steps if step is None else [step])
    for first in steps:  # all checkpoints of a run have the same model
        try:
            meta = read_record(directory, first)["meta"]
            break
        except DamagedCheckpointError as error:
            damage = error
    else:
        raise ValueError(f"checkpoint {steps[-1]} in {directory} is damaged: {damage}")
    try:
        require_format(meta)
        trained = config_from_record(meta["config"])
    except ValueError as error:
        raise ValueError(f"checkpoint {first} in {directory}: {error}") from error
    if trained.router.kind == "recorded":
        raise ValueError(
            "Router.kind='recorded' routes tokens as a record says, whatever the text "
            "is: there is nothing to evaluate or to generate"
        )
    cfg, is_mesh_given = rebind(trained, params)
    recorded = trained.data.tokenizer
    cfg = with_kept_tokenizer(cfg, directory.parent, recorded, say_loudly)
    return CheckpointSource(directory, steps, cfg, is_mesh_given)


def load_model(
    source: CheckpointSource, say: Callable[[str], None] = say_loudly
) -> LoadedModel:
    """Load the newest undamaged checkpoint of the source onto this machine's devices.

    The checksums of its arrays are verified. Raises a ValueError of one line if all
    checkpoints are damaged, if there are too few devices, or if this program builds a
    different model from the one that was saved.
    """
    import optax

    from train.checkpoint.checkpoints import quiet_orbax, read_arrays_on_all
    from train.checkpoint.checksum import require_same_arrays
    from train.step.compiled import home_placement
    from train.step.state import abstract_state

    quiet_orbax()
    run = resolve_here(source.cfg, source.is_mesh_given)
    state = abstract_state(run, optax.identity())
    wanted = {"params": state.params, "router_bias": state.router_bias}
    placement = home_placement(run)
    for step in source.steps:
        record, damage = read_record_on_all(source.directory, step)
        if record is not None:
            saved = record["arrays"].items()
            arrays = {name: x for name, x in saved if name.split("/")[0] in wanted}
            require_same_arrays(arrays, wanted)
            tree, damage = read_arrays_on_all(
                source.directory, record | {"arrays": arrays}, wanted
            )
            if tree is not None:
                params, bias, meta = tree["params"], tree["router_bias"], record["meta"]
                return LoadedModel(
                    run, params, bias, placement, step, meta, source.kept
                )
        problem = f"checkpoint {step} in {source.directory} is damaged: {damage}"
        if len(source.steps) == 1:
            raise ValueError(f"{problem}: use another one")
        say(problem)
    raise ValueError(
        f"all {len(source.steps)} checkpoints in {source.directory} are damaged"
    )


@dataclasses.dataclass(frozen=True)
class FolderSource:
    """A published folder, and the configuration to load it with."""

    folder: pathlib.Path
    cfg: Config
    """Configuration of the model, changed by the bindings that the user gave."""
    is_mesh_given: bool
    """Whether the user gave a mesh."""


def is_folder(path: pathlib.Path) -> bool:
    """Return whether a path is the folder of a published model: it has a config.json
    and no checkpoint."""
    return (path / CONFIG).is_file() and not has_checkpoint(path)


def find_folder(
    folder: pathlib.Path, step: int | None = None, params: Sequence[str] = ()
) -> FolderSource:
    """Read the configuration of a published folder, and no tensor: its model, computed
    in the dtype of its weights, with its tokenizer.

    `params` are bindings such as 'Mesh.expert = 2'. Raises a ValueError of one line for
    a config.json that moejax does not know, for a binding that changes the model, and
    for a step.
    """
    if step is not None:
        raise ValueError(
            f"--step={step} names a checkpoint, and {folder} is a published model, "
            "which has one set of weights: leave --step out"
        )
    architecture = read_architecture(folder)
    fields = {part: dict(values) for part, values in architecture.fields.items()}
    fields["model"] |= {
        "from_hf": str(folder),
        "compute_dtype": architecture.dtype,
        "gradient_reduce_dtype": architecture.dtype,
    }
    length = architecture.record.get("max_position_embeddings") or MAX_WINDOW
    length = min(length, MAX_WINDOW)
    text_ids = read_text_ids(folder)
    data = Data(
        tokenizer=str(resolve_path(folder, TOKENIZER)),
        separator=text_ids.start,
        end=text_ids.end,
        seq_len=length,
    )
    train = Train(loss_chunk=math.gcd(length, Train.loss_chunk))
    parts = {part: PARTS[part](**values) for part, values in fields.items()}
    cfg, is_mesh_given = rebind(Config(data=data, train=train, **parts), params)
    return FolderSource(folder, cfg, is_mesh_given)


def load_folder(
    source: FolderSource, say: Callable[[str], None] = say_loudly
) -> LoadedModel:
    """Load a published folder onto the devices of this machine, each process what its
    devices hold. The first process says what is unusual. Raises a ValueError of one
    line."""
    from train.checkpoint.from_hf import read_params
    from train.step.compiled import home_placement

    tell = say if is_first() else lambda _: None
    for note in read_architecture(source.folder).notes:
        tell(f"note: {note}")
    run = resolve_here(source.cfg, source.is_mesh_given)
    params, router_bias = read_params(run, say=tell)
    meta = {"config": source.cfg.to_dict(), "data": None}
    placement = home_placement(run)
    return LoadedModel(run, params, router_bias, placement, None, meta, source.folder)


def _parse_binding(param: str) -> tuple[str, str, Any]:
    """Parse a binding: 'Mesh.expert = 2' -> ('mesh', 'expert', 2)."""
    name, _, text = (part.strip() for part in param.partition("="))
    cls, _, field = name.partition(".")
    try:
        check_name(cls, field)
        value = convert(ast.literal_eval(text), KINDS[name])
    except SyntaxError as error:
        raise ValueError(
            f"--gin_param {param!r}: write Class.field = value, with quotes around text"
        ) from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"--gin_param {param!r}: {error}") from error
    if field in FIXED_FIELDS.get(cls.lower(), ()):
        raise ValueError(
            f"--gin_param {param!r}: the parameters of the checkpoint depend on this "
            "field: leave it out"
        )
    return cls.lower(), field, value


def rebind(trained: Config, params: Sequence[str]) -> tuple[Config, bool]:
    """Return the trained configuration with the user's bindings, `params`, and a batch
    of one row for each batch shard; and whether the bindings give a mesh.

    If the mesh of simulated devices changes, their number follows the mesh. Raises a
    ValueError of one line for a binding that changes the parameters.
    """
    values, given = trained.to_dict(), set()
    for part, field, value in map(_parse_binding, params):
        values[part][field] = value
        given.add((part, field))
    is_mesh_given = any(part == "mesh" for part, _ in given)
    mesh, train = Topology(**values["mesh"]), values["train"]
    is_number_given = ("train", "num_simulated_devices") in given
    if train["num_simulated_devices"] and not is_number_given:
        train["num_simulated_devices"] = mesh.num_devices
    elif train["num_simulated_devices"] and not is_mesh_given:
        mesh = _make_fitting_mesh(
            trained.moe.num_experts, train["num_simulated_devices"]
        )
        train["num_simulated_devices"] = mesh.num_devices
    if mesh != trained.mesh:
        values["dispatch"] |= {
            field: value
            for field, value in MESH_DEFAULTS.items()
            if ("dispatch", field) not in given
        }
    values["balance"] |= {"policy": "home", "calibration": None}
    values["mesh"] = dataclasses.asdict(mesh)
    train |= {"accumulate_steps": 1, "batch_size": mesh.num_batch_shards}
    return config_from_record(values), is_mesh_given


def _make_fitting_mesh(num_experts: int, num_devices: int) -> Topology:
    """Return the largest mesh with only an expert axis that divides the experts."""
    fits = range(1, min(num_experts, num_devices) + 1)
    return Topology(expert=max(n for n in fits if num_experts % n == 0))


def resolve_here(cfg: Config, is_mesh_given: bool) -> "Resolved":
    """Return a configuration, resolved on the devices of this machine.

    If the user gave no mesh, and the mesh of the run does not fit, it gets another
    mesh. Without a GPU, the transport is 'padded', and attention by 'cudnn' becomes
    'auto'. Raises a ValueError of one line if the devices are too few.
    """
    import jax

    from moejax.axes import make_mesh
    from moejax.resolve.resolved import resolve

    devices, mesh, dispatch = jax.devices(), cfg.mesh, cfg.dispatch
    is_other = mesh.num_devices != len(devices)
    if is_other and not is_mesh_given and not cfg.train.num_simulated_devices:
        mesh = _make_fitting_mesh(cfg.moe.num_experts, len(devices))
    if mesh.num_devices > len(devices):
        raise ValueError(
            f"Mesh ({mesh}) needs {mesh.num_devices} devices, but this machine has "
            f"{len(devices)}: change it with --gin_param 'Mesh.expert = 1'"
        )
    model = cfg.model
    if devices[0].platform != "gpu":
        if model.attention == "cudnn":
            model = dataclasses.replace(model, attention="auto")
        dispatch = dataclasses.replace(dispatch, transport="padded")
    if mesh != cfg.mesh:  # these fields fit only the mesh of the run
        dispatch = dataclasses.replace(dispatch, **MESH_DEFAULTS)
    train = dataclasses.replace(cfg.train, batch_size=mesh.num_batch_shards)
    changed = {"mesh": mesh, "model": model, "dispatch": dispatch, "train": train}
    cfg = dataclasses.replace(cfg, **changed)
    return resolve(cfg, make_mesh(mesh, devices[: mesh.num_devices]))
