"""Load the parameters of a checkpoint on any mesh, without changing the run directory.

    source = find_checkpoints(run_dir, params=["Mesh.expert = 2"])
    start(source.cfg)             sets the flags that jax needs; jax is not imported yet
    loaded = load_model(source)

A run may be writing to the directory meanwhile. Optimizer moments are not read.
"""

import ast
import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moejax.config import Config
from moejax.plan.layout import Topology
from train.checkpoint.identity import FIXED_FIELDS, require_format
from train.checkpoint.record import (
    DamagedCheckpointError,
    list_steps,
    read_record,
    read_record_on_all,
)
from train.config.from_hf import KEPT, with_kept_tokenizer
from train.config.names import KINDS, check_name, config_from_record, convert
from train.launch.program import say_loudly
from train.messages import one_line

if TYPE_CHECKING:
    import jax

    from moejax.moe.types import Placement
    from moejax.resolve.resolved import Resolved

MESH_DEFAULTS = {
    "schedule": "auto", "expert_shards": None, "domain": (1, 1), "compression": None,
}  # fmt: skip
"""Fields of Dispatch that fit only the mesh of their run, and their values on another
mesh."""


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
    trained = _read_config(directory, steps)
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
    from train.checkpoint.orbax_quirks import quiet_orbax
    from train.step.compiled import home_placement

    quiet_orbax()
    run = resolve_here(source.cfg, source.is_mesh_given)
    placement = home_placement(run)
    for step in source.steps:
        record, damage = read_record_on_all(source.directory, step)
        if record is not None:
            tree, damage = _read_params(source.directory, record, run)
            if tree is not None:
                return LoadedModel(
                    run,
                    tree["params"],
                    tree["router_bias"],
                    placement,
                    step,
                    record["meta"],
                    source.kept,
                )
        problem = f"checkpoint {step} in {source.directory} is damaged: {damage}"
        if len(source.steps) == 1:
            raise ValueError(f"{problem}: use another one")
        say(problem)
    raise ValueError(
        f"all {len(source.steps)} checkpoints in {source.directory} are damaged"
    )


def _read_config(directory: pathlib.Path, steps: Sequence[int]) -> Config:
    """Return the configuration in the first undamaged record.

    load_model() verifies the arrays. All checkpoints of a run have the same model.
    """
    problem = ""
    for step in steps:
        try:
            meta = read_record(directory, step)["meta"]
        except DamagedCheckpointError as damage:
            problem = str(damage)
            continue
        try:
            require_format(meta)
            return config_from_record(meta["config"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            lacks = "" if isinstance(error, ValueError) else "its configuration lacks "
            raise ValueError(
                f"checkpoint {step} in {directory}: {lacks}{one_line(error)}"
            ) from error
    raise ValueError(f"checkpoint {steps[-1]} in {directory} is damaged: {problem}")


def _parse_binding(param: str) -> tuple[str, Any]:
    """Parse a binding: 'Mesh.expert = 2' -> ('Mesh.expert', 2)."""
    name, _, text = (part.strip() for part in param.partition("="))
    try:
        check_name(*name.split(".", 1) if "." in name else (name, ""))
        value = convert(ast.literal_eval(text), KINDS[name])
    except SyntaxError as error:
        raise ValueError(
            f"--gin_param {param!r}: write Class.field = value, with quotes around text"
        ) from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"--gin_param {param!r}: {error}") from error
    part, field = _split_name(name)
    if field in FIXED_FIELDS.get(part, ()):
        raise ValueError(
            f"--gin_param {param!r}: the parameters of the checkpoint depend on this "
            "field: leave it out"
        )
    return name, value


def _split_name(name: str) -> tuple[str, str]:
    """Split a name into part and field: 'Mesh.expert' -> ('mesh', 'expert')."""
    cls, field = name.split(".")
    return cls.lower(), field


def rebind(trained: Config, params: Sequence[str]) -> tuple[Config, bool]:
    """Return the trained configuration with the user's bindings, `params`, and a batch
    of one row for each batch shard; and whether the bindings give a mesh.

    If the mesh of simulated devices changes, their number follows the mesh. Raises a
    ValueError of one line for a binding that changes the parameters.
    """
    bindings = dict(_parse_binding(param) for param in params)
    is_mesh_given = any(name.startswith("Mesh.") for name in bindings)
    values = trained.to_dict()
    for name, value in bindings.items():
        part, field = _split_name(name)
        values[part][field] = value
    mesh, train = Topology(**values["mesh"]), values["train"]
    if train["num_simulated_devices"] and "Train.num_simulated_devices" not in bindings:
        train["num_simulated_devices"] = mesh.num_devices
    elif train["num_simulated_devices"] and not is_mesh_given:
        mesh = _make_fitting_mesh(
            trained.moe.num_experts, train["num_simulated_devices"]
        )
        train["num_simulated_devices"] = mesh.num_devices
    if mesh != trained.mesh:
        given = {n.split(".")[1] for n in bindings if n.startswith("Dispatch.")}
        values["dispatch"] |= {n: v for n, v in MESH_DEFAULTS.items() if n not in given}
    values["balance"] |= {"policy": "home", "calibration": None}
    values["mesh"] = dataclasses.asdict(mesh)
    train |= {"accumulate_steps": 1, "batch_size": mesh.num_batch_shards}
    return config_from_record(values), is_mesh_given


def _make_fitting_mesh(num_experts: int, num_devices: int) -> Topology:
    """Return the largest mesh with only an expert axis that divides the experts."""
    fits = range(1, min(num_experts, num_devices) + 1)
    return Topology(expert=max(n for n in fits if num_experts % n == 0))


def resolve_here(cfg: Config, is_mesh_given: bool) -> "Resolved":
    """Return a configuration, resolved on the devices of this machine, with a mesh,
    batch and kernels for them. Raises a ValueError of one line if they are too few."""
    import jax

    from moejax.axes import make_mesh
    from moejax.resolve.resolved import resolve

    cfg = _adapt_to_devices(cfg, is_mesh_given, jax.devices())
    return resolve(cfg, make_mesh(cfg.mesh, jax.devices()[: cfg.mesh.num_devices]))


def _adapt_to_devices(
    cfg: Config, is_mesh_given: bool, devices: "Sequence[jax.Device]"
) -> Config:
    """Return the configuration for the devices of this machine.

    If the user gave no mesh, and the mesh of the run does not fit, it gets another
    mesh. Without a GPU, the transport is 'padded', and attention by 'cudnn' becomes
    'auto'.
    """
    mesh = cfg.mesh
    is_other = mesh.num_devices != len(devices)
    if is_other and not is_mesh_given and not cfg.train.num_simulated_devices:
        mesh = _make_fitting_mesh(cfg.moe.num_experts, len(devices))
    if mesh.num_devices > len(devices):
        raise ValueError(
            f"Mesh ({mesh}) needs {mesh.num_devices} devices, but this machine has "
            f"{len(devices)}: change it with --gin_param 'Mesh.expert = 1'"
        )
    model, dispatch = cfg.model, cfg.dispatch
    if devices[0].platform != "gpu":
        if model.attention == "cudnn":
            model = dataclasses.replace(model, attention="auto")
        dispatch = dataclasses.replace(dispatch, transport="padded")
    if mesh != cfg.mesh:  # these fields fit only the mesh of the run
        dispatch = dataclasses.replace(dispatch, **MESH_DEFAULTS)
    rows = mesh.num_batch_shards
    train = dataclasses.replace(cfg.train, batch_size=rows)
    changed = {"mesh": mesh, "model": model, "dispatch": dispatch, "train": train}
    return dataclasses.replace(cfg, **changed)


def _read_params(
    directory: pathlib.Path, record: dict, run: "Resolved"
) -> tuple[dict[str, Any] | None, str]:
    """Return the verified parameters and router bias, or None and what is wrong."""
    import optax

    from train.checkpoint.checkpoints import read_arrays_on_all
    from train.checkpoint.checksum import require_same_arrays
    from train.step.state import abstract_state

    state = abstract_state(run, optax.identity())
    wanted = {"params": state.params, "router_bias": state.router_bias}
    saved = record["arrays"].items()
    saved = {name: array for name, array in saved if name.split("/")[0] in wanted}
    require_same_arrays(saved, wanted)
    return read_arrays_on_all(directory, record | {"arrays": saved}, wanted)
