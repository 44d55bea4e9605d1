"""Damaged config.json of published models, alone and beside tensors: how to damage
them, and how programs read them."""

import json
import pathlib
import random

from moejax.config import Mla, Model, Moe, Network, Router
from moejax.interop import tree
from moejax.interop.architecture import CONFIG
from moejax.interop.export import make_config, write_model
from moejax.interop.families import FAMILIES
from moejax.interop.fields import make_network
from moejax.interop.published import open_model, read_architecture
from moejax.interop.views import View
from tests.support import mutations
from tests.support.mutations import JSON, Mutator

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "hf"
SPELLINGS = ("config.json", "config_v4.json")
TINY = {
    "mixtral": Network(
        Model(8, 8, 2, 2, 1, head_dim=4, d_ff=4), Moe(num_experts=2, d_expert=4)
    ),
    "deepseek_v3": Network(
        Model(8, 8, 2, 2, 2, head_dim=4, d_ff=6, first_k_dense=1),
        Moe(num_experts=2, d_expert=4, num_shared_experts=1),
        Router(kind="sigmoid"),
        mla=Mla(4, None, 4, 2, 4),
    ),
}
"""Networks that are written with tensors."""
VALUES = (
    None, True, False, 0, 1, 2, 3, 8, 64, 1.5, 0.0, -0.0, -1, -1.5, 1e-320, 1e300, "",
    "silu", "gelu", "8", "yarn", "dynamic", "default", [], {}, [0], [1, 0, 1], [[]],
    ["full_attention"] * 2, ["sliding_attention"] * 3, [2**40], [-1], [None], {"a": 1},
    {"rope_type": "yarn", "factor": 4.0}, {"type": "linear", "factor": "2"},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1},
    {"quant_method": "fp8", "weight_block_size": [128, 128]}, mutations.CONTROL_TEXT,
    {"quant_method": "gptq"}, "x" * 100_000, *mutations.HUGE_INTS,
)  # fmt: skip


def _keys() -> tuple[str, ...]:
    found = {"num_experts", "quantization_config", "text_config", "scoring_func"}
    for path in GOLDEN.glob("*/config*.json"):
        record = json.loads(path.read_text())
        found |= record.keys() | (record.get("rope_parameters") or {}).keys()
    return tuple(sorted(found))


KEYS = _keys()
"""Keys of all config.json."""


def change_key(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Set or remove up to three keys of a config.json, at the top or one level
    below."""
    try:
        record, second = json.loads(whole), json.loads(other)
        inner = [value for value in record.values() if isinstance(value, dict)]
    except (ValueError, AttributeError, RecursionError):
        return mutations.flip_bits(whole, other, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at = rng.choice(inner) if inner and rng.random() < 0.3 else record
        key = rng.choice(KEYS if rng.random() < 0.3 else list(at) or KEYS)
        kind = rng.random()
        if kind < 0.1:
            at.pop(key, None)
        elif kind < 0.3 and isinstance(second, dict):
            at[key] = second.get(key)
        elif kind < 0.45 and isinstance(at.get(key), int | float):
            at[key] = rng.choice((at[key] + 1, at[key] * 2, at[key] // 2, -at[key]))
        else:
            at[key] = rng.choice(VALUES)
    return json.dumps(record).encode()


CONFIGS: tuple[Mutator, ...] = (*JSON, *(change_key,) * 60)
"""Mutators of a config.json."""


def build_configs(folder: pathlib.Path, variant: int) -> None:
    """Write every config.json of the golden folders, and two models with tensors."""
    for name in sorted(path.name for path in GOLDEN.iterdir()):
        for spelling in SPELLINGS:
            inside = folder / "model" / f"{name}-{pathlib.Path(spelling).stem}"
            inside.mkdir(parents=True)
            (inside / CONFIG).write_bytes((GOLDEN / name / spelling).read_bytes())
    for name, network in TINY.items():
        write_tiny(folder / "model" / f"tiny-{name}", name, network)
    for path in (folder / "model").glob("*/config.json"):
        (path.parent / "valid").write_bytes(path.read_bytes())


def write_tiny(out: pathlib.Path, name: str, network: Network) -> None:
    """Write a network with zeros for parameters, as this family."""
    trees = map(tree.as_tree, tree.abstract(FAMILIES[name], network))
    write_model(out, network, *trees, family=name, dtype="float32")


def read_configs(folder: pathlib.Path) -> None:
    """Read what was damaged, or all if nothing was. Raise AssertionError if a config is
    accepted whose model is written as another one."""
    paths = sorted((folder / "model").iterdir())
    damaged = [p for p in paths if (p / CONFIG).read_bytes() != _valid(p)]
    for path in damaged or paths:
        architecture = read_architecture(path)
        network = make_network(architecture.fields)
        make_config(network, record=architecture.record)
        if not path.name.startswith("tiny"):
            continue
        model = open_model(path)
        for leaf in tree.as_leaves(model.params).values():
            assert isinstance(leaf, View)
            assert not leaf.read().any()


def _valid(path: pathlib.Path) -> bytes:
    return (path / "valid").read_bytes()
