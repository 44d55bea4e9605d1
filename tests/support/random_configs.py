"""Draw random configurations of small models on one to eight simulated devices, and
trace their steps."""

import dataclasses
import itertools
import random
import types
import typing
from typing import Any, Literal

import jax
import pytest

from moejax.axes import make_mesh
from moejax.balance.policies import POLICIES
from moejax.config import Config
from moejax.plan.layout import Topology
from tests.support.steps import FAMILIES, WAYS, configure
from train import job
from train.config.names import KINDS, PARTS
from train.step.compiled import trace_train_step
from train.step.step import StepContext

Fields = dict[str, Any]
"""Values of all fields of a configuration, by names such as 'Moe.top_k'."""
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24)
POOLS: dict[str, tuple] = {
    "Model.vocab_size": (1, 7, 16, 24, 48),
    "Model.d_model": (*SIZES, 10, 34, 48),
    "Model.num_layers": (1, 2, 3, 4),
    "Model.num_heads": (1, 2, 3, 4, 6, 8),
    "Model.num_kv_heads": (1, 2, 3, 4),
    "Model.head_dim": (2, 3, 4, 6, 8),
    "Model.layers": (None, ("moe",), ("dense", "moe"), ("moe", "moe", "dense"), ()),
    "Attention.layers": (
        ("full",), ("sliding",), ("chunked", "nope"), ("nope",), ("full", "sliding"),
        (),
    ),
    "Moe.d_expert": (*SIZES, 32, 40, 48),
    "Moe.num_experts": (1, 2, 3, 4, 5, 6, 8, 9, 12, 16),
    "Dispatch.domain": (
        "auto", (1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (2, 4), (1, 3), (3, 1), (0, 0),
        (1, 0), (0, 2), (-1, 2), (1, 8),
    ),
    "Dispatch.buffer_factor": (0.0, 0.01, 0.5, 1.0, 1.5, 4.0, 1e6, 1e300),
    "Dispatch.compression": (None, 0.5, 1.0, 1.5, 8.0, 1e6, 1e300),
    "Optimizer.frozen": (
        (), ("router",), ("experts", "embedding"), ("*/attention/q_*",), ("expert",),
        ("*",), ("shared", "dense"),
    ),
    "Recorded.source": (
        "uniform", "zipf", "one_hot", "rotating", "burst", "wandering", "missing.npz",
    ),
    "Recorded.period_steps": (0, 1, 2, 20, 2**31 - 1),
    "Balance.policy": (*POLICIES, "auto", "hone"),
    "Balance.calibration": (None, None, "missing.json"),
    "Data.seq_len": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16),
    "Train.batch_size": (*SIZES, 32, 48),
    "Train.accumulate_steps": (1, 2, 3, 4),
    "Train.loss_chunk": (1, 2, 3, 4, 8, 16, 256),
    "Train.num_simulated_devices": (None, 1, 2, 3, 4, 6, 8),
}  # fmt: skip
"""Values to draw from where those of the field's type do not suit a small model."""
KEPT = (
    "Model.from_hf", "Data.corpus", "Data.weights", "Data.tokenizer", "Data.text_key",
    "Data.separator", "Data.end", "Train.run_dir", "Recorded.array",
)  # fmt: skip
"""Fields that only name files or what is in them, and keep their values."""
NUMBERS: dict[type, tuple] = {
    bool: (False, True),
    int: (*SIZES, 0, -1, 20, 64, 2**31),
    float: (0.0, 0.1, 0.5, 1.0, 1.5, 4.0, -1.0, 1e-30, 1e30),
}
WEIGHTS = {"Mesh": 2, "Model": 3, "Moe": 4, "Dispatch": 6, "Router": 2, "Balance": 2}
"""Numbers of chances of a class's fields where other classes have one."""
NAMES = [
    name
    for name in KINDS
    if name not in KEPT
    for _ in range(WEIGHTS.get(name.split(".")[0], 1))
]
BASES = [
    configure(family, **{name: part for name, part in way.items() if name in PARTS})
    for family, way in itertools.chain(
        ((family, {}) for family in FAMILIES), (("small", way) for way in WAYS.values())
    )
]
"""Valid configurations from which the others are made."""
MESHES = [
    sizes
    for sizes in itertools.product(range(1, 9), repeat=4)
    if Topology(*sizes).num_devices <= 8
]


def random_config(seed: int) -> Config:
    """Return the configuration of a seed. Raises ValueError for one that breaks a rule
    between fields."""
    return config_with(random_fields(seed))


def random_fields(seed: int) -> Fields:
    """Return the fields of a seed's configuration.

    It is a valid configuration with some fields drawn anew. Two times in three the mesh
    is another one too, to which batch and widths are then mostly fitted.
    """
    rng = random.Random(seed)
    fields = _fields_of(rng.choice(BASES))
    if rng.random() < 2 / 3:
        _draw_mesh(fields, rng)
    for name in rng.sample(NAMES, rng.choice((0, 1, 1, 2, 2, 3, 4, 5, 8, 16, 64))):
        fields[name] = draw(name, rng)
    return fields


def config_with(fields: Fields) -> Config:
    """Return the configuration of these fields. Raises ValueError for one that breaks
    a rule between fields."""
    parts: dict[str, Fields] = {}
    for name, value in fields.items():
        part, field = name.split(".")
        parts.setdefault(part.lower(), {})[field] = value
    return Config(**{name: PARTS[name](**values) for name, values in parts.items()})


def draw(name: str, rng: random.Random) -> Any:
    """Return a value of a field's type, right or wrong."""
    return rng.choice(values_of(name))


def values_of(name: str) -> tuple:
    """Return the values of a field from which one is drawn."""
    return POOLS[name] if name in POOLS else _values_of(KINDS[name])


def prepare(cfg: Config) -> StepContext:
    """Return the context of a run's steps on as many of this machine's devices as its
    mesh has, as the main job makes it."""

    def make_mesh_of_some(topology: Topology):
        return make_mesh(topology, jax.devices()[: topology.num_devices])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "make_mesh", make_mesh_of_some)
        context = job.prepare_model(cfg)
    context.run.recorded_sha256()
    context.run.lines()
    return context


def trace(context: StepContext) -> None:
    """Trace the train step of a context; compile nothing."""
    trace_train_step(context)


def _fields_of(cfg: Config) -> Fields:
    return {
        f"{part.name.title()}.{field.name}": getattr(
            getattr(cfg, part.name), field.name
        )
        for part in dataclasses.fields(cfg)
        for field in dataclasses.fields(getattr(cfg, part.name))
    }


def _draw_mesh(fields: Fields, rng: random.Random) -> None:
    """Draw a mesh and, three times in four each, sizes that it divides."""
    mesh = Topology(*rng.choice(MESHES))
    fields |= {f"Mesh.{name}": size for name, size in dataclasses.asdict(mesh).items()}
    shards = mesh.num_batch_shards * fields["Train.accumulate_steps"]
    n, heads = mesh.num_devices, mesh.tensor * rng.choice((1, 1, 2))
    fitted = {
        "Train.batch_size": shards * rng.choice((1, 2, 3)),
        "Moe.num_experts": n * rng.choice((1, 2)) // mesh.data,
        "Moe.d_expert": n * rng.choice((1, 2, 3, 5, 8)),
        "Model.d_model": n * rng.choice((2, 3, 5)),
    }
    fields |= {name: value for name, value in fitted.items() if rng.random() < 3 / 4}
    if rng.random() < 3 / 4:
        is_latent = fields["Mla.kv_lora_rank"] is not None
        fields["Model.num_kv_heads"] = heads
        fields["Model.num_heads"] = heads * (1 if is_latent else rng.choice((1, 2)))


def _values_of(kind: Any) -> tuple:
    """Return values of an annotation."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return args
    if origin in (typing.Union, types.UnionType):
        return tuple(value for arg in args for value in _values_of(arg))
    return (None,) if kind is type(None) else NUMBERS[kind]
