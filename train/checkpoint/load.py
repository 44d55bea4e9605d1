"""Parameters of any checkpoint, on any mesh, changing nothing where they lie.

    found = find(run_dir, params=["Mesh.expert = 2"])    no jax yet: found.cfg says
    start(found.cfg)                                     which flags it needs
    loaded = load(found)

A run may be writing to the directory meanwhile. Optimizer moments are not read.
"""

import ast
import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moejax.config import Config
from moejax.plan.layout import Topology
from train.checkpoint.identity import FIXED, require_format
from train.checkpoint.record import record_for_all, steps_in
from train.config.names import KINDS, check_name, config_from_record, convert
from train.launch.program import one_line, say_loudly

if TYPE_CHECKING:
    import jax

    from moejax.moe.types import Placement
    from moejax.resolve.resolved import Resolved

UNCUT = {
    "schedule": "auto", "expert_shards": None, "domain": (1, 1), "compression": "none",
    "gradient_compression": None,
}  # fmt: skip
"""Fields of Dispatch that follow a run's mesh, as another mesh takes them."""


@dataclasses.dataclass(frozen=True)
class Found:
    """Where to read, and what is to run."""

    directory: pathlib.Path
    steps: tuple[int, ...]
    """Checkpoints to try, in order."""
    cfg: Config
    """The run's own, with what `params` changed; its devices are simulated or there."""
    is_mesh_given: bool


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A trained model on its devices."""

    run: "Resolved"
    """The run's own, but for mesh, batch and what else suits this machine."""
    params: Any
    router_bias: Any
    placement: "Placement"
    step: int
    meta: dict[str, Any]
    """The checkpoint's: configuration of the run, data identity and plan."""

    @property
    def cfg(self) -> Config:
        return self.run.cfg

    @property
    def mesh(self) -> "jax.sharding.Mesh":
        return self.run.mesh


def find(
    run_dir: str | pathlib.Path, step: int | None = None, params: Sequence[str] = ()
) -> Found:
    """Find the checkpoints of a run: all, newest first, or the one of `step`.

    `params` are bindings such as 'Mesh.expert = 2'. Raises ValueError in one line where
    there is no checkpoint, or none that says what it is, and for a binding that the
    parameters do not allow.
    """
    directory = pathlib.Path(run_dir).absolute() / "checkpoints"
    there = steps_in(directory) if directory.is_dir() else []
    if not there:
        raise ValueError(
            f"{run_dir} has no checkpoints: name the run directory of a run of "
            "train/main.py that has saved"
        )
    if step is not None and step not in there:
        shown = ", ".join(map(str, sorted(there)))
        raise ValueError(f"{run_dir} has no checkpoint of step {step}: it has {shown}")
    steps = tuple(there if step is None else [step])
    trained = _config_in(directory, steps)
    if trained.router.kind == "recorded":
        raise ValueError(
            "Router.kind='recorded' sends tokens where a record says, whatever the "
            "text: there is nothing to evaluate or to generate"
        )
    bound = dict(_binding(param) for param in params)
    is_mesh_given = any(name.startswith("Mesh.") for name in bound)
    cfg = _rebound(trained, bound, is_mesh_given)
    return Found(directory, steps, cfg, is_mesh_given)


def load(found: Found, say: Callable[[str], None] = say_loudly) -> Loaded:
    """Load the newest whole checkpoint of those found onto the devices of this machine,
    and verify its checksums.

    Raises ValueError in one line when none is whole, when the devices are too few, or
    when this program builds another model than the one that was saved.
    """
    import jax

    from moejax.axes import make_mesh
    from moejax.resolve.resolved import resolve
    from train.checkpoint.orbax_quirks import quiet_orbax
    from train.step.compiled import home_placement

    quiet_orbax()
    cfg = _on_these_devices(found, jax.devices())
    mesh = make_mesh(cfg.mesh, jax.devices()[: cfg.mesh.num_devices])
    run = resolve(cfg, mesh)
    placement = home_placement(run)
    for step in found.steps:
        record, damage = record_for_all(found.directory, step)
        if record is not None:
            tree, damage = _read(found.directory, record, run)
            if tree is not None:
                params, bias = tree["params"], tree["router_bias"]
                return Loaded(run, params, bias, placement, step, record["meta"])
        problem = f"checkpoint {step} in {found.directory} is damaged: {damage}"
        if len(found.steps) == 1:
            raise ValueError(f"{problem}: use another one")
        say(problem)
    raise ValueError(
        f"none of the {len(found.steps)} checkpoints in {found.directory} is whole"
    )


def _config_in(directory: pathlib.Path, steps: Sequence[int]) -> Config:
    """Return the configuration in the first record that can be read; load() verifies
    the rest. All checkpoints of a run are of one model."""
    problem = ""
    for step in steps:
        try:
            text = (directory / str(step) / "record" / "metadata").read_bytes()
            meta = json.loads(text)["meta"]
            require_format(meta)
            return config_from_record(meta["config"])
        except (OSError, json.JSONDecodeError, UnicodeDecodeError) as fault:
            problem = one_line(fault)
        except (KeyError, TypeError, AttributeError) as fault:
            problem = f"it lacks {fault}"
    raise ValueError(
        f"checkpoint {steps[-1]} in {directory} is damaged: its record: {problem}"
    )


def _binding(param: str) -> tuple[str, Any]:
    """Return name and value of a binding: 'Mesh.expert = 2' -> ('Mesh.expert', 2)."""
    name, _, text = (part.strip() for part in param.partition("="))
    try:
        check_name(*name.split(".", 1) if "." in name else (name, ""))
        value = convert(ast.literal_eval(text), KINDS[name])
    except SyntaxError as fault:
        raise ValueError(
            f"--gin_param {param!r}: write Class.field = value, text in quotes"
        ) from fault
    except (ValueError, TypeError) as fault:
        raise ValueError(f"--gin_param {param!r}: {fault}") from fault
    part, field = _place(name)
    if field in FIXED.get(part, ()):
        raise ValueError(
            f"--gin_param {param!r}: the parameters of the checkpoint depend on it: "
            "leave it out"
        )
    return name, value


def _place(name: str) -> tuple[str, str]:
    """Return part and field of a name: 'Mesh.expert' -> ('mesh', 'expert')."""
    cls, field = name.split(".")
    return cls.lower(), field


def _rebound(trained: Config, bound: dict[str, Any], is_mesh_given: bool) -> Config:
    """Return the configuration with `bound`, and one row for each shard of the batch.

    A mesh of simulated devices that is changed brings its number of devices.
    """
    values = trained.to_dict()
    for name, value in bound.items():
        part, field = _place(name)
        values[part][field] = value
    mesh, train = Topology(**values["mesh"]), values["train"]
    if train["num_simulated_devices"] and "Train.num_simulated_devices" not in bound:
        train["num_simulated_devices"] = mesh.num_devices
    elif train["num_simulated_devices"] and not is_mesh_given:
        mesh = _fitting(trained.moe.num_experts, train["num_simulated_devices"])
        train["num_simulated_devices"] = mesh.num_devices
    if mesh != trained.mesh:
        kept = {name.split(".")[1] for name in bound if name.startswith("Dispatch.")}
        values["dispatch"] |= {n: value for n, value in UNCUT.items() if n not in kept}
    values["balance"] |= {"policy": "home", "calibration": None}
    values["mesh"] = dataclasses.asdict(mesh)
    train |= {"accumulate_steps": 1, "batch_size": mesh.num_batch_shards}
    return config_from_record(values)


def _fitting(num_experts: int, num_devices: int) -> Topology:
    """Return a mesh of one expert axis, as long as divides the experts."""
    fits = range(1, min(num_experts, num_devices) + 1)
    return Topology(expert=max(n for n in fits if num_experts % n == 0))


def _on_these_devices(found: Found, devices: "Sequence[jax.Device]") -> Config:
    """Return the configuration for the devices here: another mesh where nobody asked
    for the run's and it does not fit, and the portable kernels where they are no
    GPUs."""
    cfg, mesh = found.cfg, found.cfg.mesh
    is_other = mesh.num_devices != len(devices)
    if is_other and not found.is_mesh_given and not cfg.train.num_simulated_devices:
        mesh = _fitting(cfg.moe.num_experts, len(devices))
    if mesh.num_devices > len(devices):
        raise ValueError(
            f"Mesh ({mesh}) needs {mesh.num_devices} devices, and "
            f"{len(devices)} are here: change it with --gin_param 'Mesh.expert = 1'"
        )
    model, dispatch = cfg.model, cfg.dispatch
    if devices[0].platform != "gpu":
        model = dataclasses.replace(model, attention="xla")
        dispatch = dataclasses.replace(dispatch, transport="padded")
    if mesh != cfg.mesh:  # what was cut for the run's devices
        dispatch = dataclasses.replace(dispatch, **UNCUT)
    rows = mesh.num_batch_shards
    train = dataclasses.replace(cfg.train, batch_size=rows)
    changed = {"mesh": mesh, "model": model, "dispatch": dispatch, "train": train}
    return dataclasses.replace(cfg, **changed)


def _read(
    directory: pathlib.Path, record: dict, run: "Resolved"
) -> tuple[dict[str, Any] | None, str]:
    """Return parameters and router bias, verified; or None and what is wrong."""
    import optax

    from train.checkpoint.checkpoints import arrays_for_all
    from train.checkpoint.checksum import require_same_arrays
    from train.step.state import abstract_state

    state = abstract_state(run, optax.identity())
    wanted = {"params": state.params, "router_bias": state.router_bias}
    saved = record["arrays"].items()
    saved = {name: array for name, array in saved if name.split("/")[0] in wanted}
    require_same_arrays(saved, wanted)
    return arrays_for_all(directory, record | {"arrays": saved}, wanted)
