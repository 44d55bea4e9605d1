"""The stages that train: 'steps', 'profile' and 'variants'."""

import dataclasses
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from moejax.config import Config
from tools.stages import runner
from tools.stages.models import (
    predicted_bytes,
    read_models,
    trained_model,
    with_layers,
)
from tools.stages.stage import Result, Settings, Task
from tools.stages.trial import measure

NUM_STEPS, PLAIN_STEPS = 30, 10
MAX_DIFFERENCE = 0.02
"""Largest difference of a loss from that of the plain kernels, over that loss."""
PROFILED = range(4, 7)
MAX_TRACE_BYTES = 12 * 2**20
"""Size of a trace that is copied to OUT at most."""
VARIANT_STEPS = {True: 4, False: 10}
VARIANT_SEC = 150.0
"""Limit on one variant, compilation included."""


@dataclasses.dataclass(frozen=True)
class Variant:
    """A change of the run whose effect is measured by itself."""

    params: tuple[str, ...] = ()
    """Bindings of gin."""
    flags: str = ""
    """Flags of XLA."""
    tiles: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of Tiles that the products of the run have: a second form of a kernel."""
    is_toy: bool = False
    """Whether a dry run measures it too."""


VARIANTS = {
    "as it is": Variant(is_toy=True),
    "remat none": Variant(("Model.remat = 'none'",)),
    "remat dispatch": Variant(("Model.remat = 'dispatch'",)),
    "remat full": Variant(("Model.remat = 'full'",)),
    "loss_chunk 512": Variant(("Train.loss_chunk = 512",)),
    "loss_chunk 2048": Variant(("Train.loss_chunk = 2048",)),
    "fp8": Variant(("Dispatch.fp8 = 'e4m3'",)),
    "approximate exp": Variant(tiles={"math": "approx"}),
    "no command buffers": Variant(flags="--xla_gpu_enable_command_buffer="),
    "no Triton products": Variant(flags="--xla_gpu_enable_triton_gemm=false"),
    "no latency hiding": Variant(
        flags="--xla_gpu_enable_latency_hiding_scheduler=false"
    ),
}


def steps(task: Task) -> Result:
    """Train the largest model of the family that fits, and compare its losses with
    those of the plain kernels."""
    cfg = begin(task)
    predicted = predicted_bytes(cfg, task.settings)
    task.note(f"{NUM_STEPS} steps", predicted_bytes=predicted)
    own = measure(cfg, NUM_STEPS)
    own["kernels"] = choices(cfg, task.settings)
    task.note(f"{PLAIN_STEPS} steps with the plain kernels", **own)
    plain = compare_with_plain(cfg, own)
    task.note("the end", plain=plain)
    sec, difference = own["compile_sec"], plain["max_loss_difference"]
    why = (
        f"{own['num_layers']} layers: {own['tok_per_sec']:,.0f} tokens/s, "
        f"{_percent(own['mfu'])} MFU, "
        f"{_gib(own['peak_bytes'] or own['compiled_bytes'])} of "
        f"{_gib(predicted)} predicted, compiled in {sum(sec.values()):.0f} s; beside "
        f"plain kernels, {plain['num_layers']} layers: {plain['speedup']:.2f} times as "
        f"fast, losses within {difference:.1e}"
    )
    is_right = difference <= MAX_DIFFERENCE
    return Result("passed" if is_right else "failed", why, task.figures)


def compare_with_plain(cfg: Config, own: dict) -> dict:
    """Return the speed over that of the plain kernels, and the largest difference of a
    loss. Plain kernels may need more memory: then both train fewer layers."""
    num_layers = own["num_layers"]
    while True:
        cut = with_layers(cfg, num_layers)
        try:
            plain = measure(make_plain(cut), PLAIN_STEPS)
            break
        except Exception:  # XLA has several for too little memory
            if num_layers == 1:
                raise
            num_layers //= 2
    if num_layers != own["num_layers"]:
        own = measure(cut, PLAIN_STEPS)
    pairs = zip(own["losses"], plain["losses"])
    return {
        "num_layers": num_layers,
        "tok_per_sec": plain["tok_per_sec"],
        "losses": plain["losses"],
        "speedup": own["tok_per_sec"] / plain["tok_per_sec"],
        "max_loss_difference": max(abs(a - b) / abs(b) for a, b in pairs),
    }


def profile(task: Task) -> Result:
    """Profile three steps of the same model, and read the trace."""
    from tools import read_profile

    cfg = begin(task)
    folder = task.path.with_name("profile")
    shutil.rmtree(folder, ignore_errors=True)
    task.note("profiled steps")
    own = measure(cfg, PROFILED.stop - 1, folder, PROFILED)
    summary = read_profile.read_summary(pathlib.Path(own["profile"]))
    read_profile.show(summary)
    trace = pathlib.Path(own["profile"]) / "perfetto_trace.json.gz"
    if trace.stat().st_size <= MAX_TRACE_BYTES:
        shutil.copy(trace, pathlib.Path(task.settings.out) / "trace.json.gz")
    parts = list(summary["parts"].items())[:4]
    text = ", ".join(f"{name} {row['busy_msec']:.2f}" for name, row in parts)
    why = f"{summary['step_msec']:.1f} ms a step; longest parts in ms: {text}"
    return Result("passed", why, summary)


def variants(task: Task) -> Result:
    """Measure variants of the run one at a time, each in a process of its own."""
    is_dry = task.settings.is_dry
    chosen = {name: own for name, own in VARIANTS.items() if own.is_toy or not is_dry}
    rows: dict[str, dict] = {}
    for name, variant in chosen.items():
        task.note(name, variants=rows)
        if task.left_sec < VARIANT_SEC / (10 if is_dry else 2):
            rows[name] = {"why": "no time was left"}
            continue
        rows[name] = run_variant(task, variant)
    figures = {"variants": rows}
    base = rows["as it is"].get("tok_per_sec")
    if not base:
        return Result("failed", f"as it is: {rows['as it is'].get('why')}", figures)
    parts = [
        f"{name} {row['tok_per_sec'] / base:.2f}" if "tok_per_sec" in row
        else f"{name} - ({row['why']})"
        for name, row in rows.items() if name != "as it is"
    ]  # fmt: skip
    why = f"as it is {base:,.0f} tokens/s"
    if parts:
        why += f"; speed over that: {', '.join(parts)}"
    return Result("passed", why, figures)


def run_variant(task: Task, variant: Variant) -> dict:
    """Return the figures of a variant, or why it has none."""
    environ, settings = dict(os.environ), task.settings
    if variant.tiles:
        folder = task.path.with_name("variant-tiles")
        if why := write_tiles(settings, variant.tiles, folder):
            return {"why": why}
        environ["MOEJAX_TUNED"] = str(folder)
    environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {variant.flags}".strip()
    spec, result = (task.path.with_name(n) for n in ("trial.json", "trial-result.json"))
    num_steps = VARIANT_STEPS[settings.is_dry]
    spec.write_text(json.dumps({"params": variant.params, "num_steps": num_steps}))
    result.unlink(missing_ok=True)
    words = [sys.executable, "-m", "tools.stages.trial"]
    words += [str(task.path.with_name("settings.json")), str(spec), str(result)]
    end = runner.run_in_group(words, min(VARIANT_SEC, task.left_sec), environ)
    if not result.is_file():
        return {"why": end.why or "it wrote nothing"}
    row = json.loads(result.read_text())
    return {name: value for name, value in row.items() if name != "kernels"}


def write_tiles(
    settings: Settings, fields: Mapping[str, Any], folder: pathlib.Path
) -> str:
    """Write the file of choices to `folder`, with other fields of the tiles of all
    passes that have them. Return why that cannot be done, or ''."""
    from moejax.kernels import device_file
    from moejax.kernels.tuning import Tiles
    from tools.bench.tune_search import is_possible

    known = {field.name for field in dataclasses.fields(Tiles)}
    if unknown := [name for name in fields if name not in known]:
        return f"Tiles has no {', '.join(unknown)}"
    path = device_file.path_of(settings.device_kind)
    record = device_file.load(path, settings.device_kind)
    if not record["tiles"]:
        return "no tiles are measured"
    for key, own in record["tiles"].items():
        changed = Tiles(**own | fields)
        if is_possible(key.split()[0], changed):
            record["tiles"][key] = dataclasses.asdict(changed)
    device_file.save(folder / path.name, record)
    return ""


def begin(task: Task) -> Config:
    """Start jax for the configurations, and return the one that is trained."""
    from train.launch.program import start

    start(next(iter(read_models(task.settings).values())))
    return trained_model(task.settings)


def make_plain(cfg: Config) -> Config:
    """Return the configuration with XLA's operations in place of our kernels."""
    return dataclasses.replace(
        cfg,
        dispatch=dataclasses.replace(cfg.dispatch, kernels="plain"),
        model=dataclasses.replace(cfg.model, attention="blocked"),
    )


def choices(cfg: Config, settings: Settings) -> dict[str, list[str]]:
    """Return the implementation of each operation of a run, with the reason. In a dry
    run they are those of the interpreted device."""
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType

    from moejax.axes import AXES
    from moejax.resolve.resolved import resolve

    device = AbstractDevice(settings.device_kind, None, "gpu")
    mesh = AbstractMesh(
        cfg.mesh.sizes, AXES, axis_types=(AxisType.Auto,) * 4, abstract_device=device
    )
    if settings.is_dry:  # the kernels do not take the dtype of a CPU's run
        model = dataclasses.replace(
            cfg.model, compute_dtype="bfloat16", d_model=1024, head_dim=64
        )
        moe = dataclasses.replace(cfg.moe, d_expert=128)
        data = dataclasses.replace(cfg.data, seq_len=256)
        train = dataclasses.replace(cfg.train, loss_chunk=256)
        cfg = dataclasses.replace(cfg, model=model, moe=moe, data=data, train=train)
    run = resolve(cfg, mesh, None)
    return {name: list(choice) for name, choice in run.kernels.items()}


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _percent(share: float | None) -> str:
    return "no" if share is None else f"{share:.1%}"
