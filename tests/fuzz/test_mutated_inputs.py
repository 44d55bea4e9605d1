"""Damaged files that users give and that a run writes are read, or refused in one line:
no traceback, no character that a terminal obeys, no memory beyond a limit.

Each reader calls what a program calls, down to the use of what was read, and asserts
what must hold for whatever is read.
"""

import contextlib
import json
import pathlib
import random
import resource
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
import pytest
import safetensors
from jax.experimental.compilation_cache import compilation_cache

from moejax.config import Data, Recorded
from moejax.interop import tree
from moejax.interop.export import make_config
from moejax.interop.fields import make_network
from moejax.interop.folder import TensorFolder
from moejax.interop.published import open_model, read_architecture
from moejax.moe.recorded import loads
from moejax.resolve.speeds import load_calibration, make_cost_model
from tests.support.calibrations import TWO_LEVELS
from tests.support.checkpoint_state import CFG, build_mesh, make_state
from tests.support.data_files import TEXTS, bpe_json, write_jsonl, write_parquet
from tests.support.golden_hf import ROOT as GOLDEN
from tests.support.metrics_lines import DECISIONS, balanced_lines
from tests.support.mutations import BYTES, TEXT, Mutator, mutate
from tests.support.tensor_folders import (
    INDEX,
    SINGLE,
    TINY,
    make_arrays,
    write_shards,
    write_tiny,
)
from train.checkpoint.checkpoints import Checkpointer
from train.checkpoint.identity import FORMAT
from train.checkpoint.load import find_checkpoints
from train.checkpoint.record import newest_meta
from train.config import gin_reader
from train.data import HeldOut, TrainBatches, byte_sample, load_corpus
from train.data.prepared import prepare
from train.data.tokenizer import load_tokenizer
from train.launch.program import guarded
from train.logs.balance_summary import balance_lines, summarise_balance
from train.logs.record_lines import MetricsLog
from train.messages import MAX_LINE

ROOT = pathlib.Path(__file__).resolve().parents[2]
GIN = ROOT / "tests" / "support" / "toy.gin"
ADDRESS_SPACE = 3 * 2**30
"""Bytes that a reader may map beside what the process has mapped before."""


class Format(NamedTuple):
    """A format, how files of it are made and damaged, and how programs read them."""

    file: str
    """Glob of files, one of which is damaged."""
    build: Callable[[pathlib.Path, int], object]
    """Function of a folder and a variant, 0 or 1, that writes valid files there."""
    read: Callable[[pathlib.Path], object]
    """Function of the path of the file that is damaged."""
    mutators: Sequence[Mutator]
    name: str
    """A text that an error must hold, for it names the file."""
    num_cases: int = 100


def build_gin(folder: pathlib.Path, variant: int) -> None:
    shutil.copy((GIN, ROOT / "configs" / "tiny_cpu.gin")[variant], folder / "a.gin")


def read_gin(path: pathlib.Path) -> None:
    cfg = gin_reader.load([path])
    rendered = path.with_name("b.gin")
    rendered.write_text(gin_reader.render(cfg), encoding="utf-8")
    assert gin_reader.load([rendered]) == cfg
    gin_reader.render(cfg, only_changed=True)


def build_calibration(folder: pathlib.Path, variant: int) -> None:
    shipped = ROOT / "configs" / "skewed_cpu.calibration.json"
    (folder / "a.json").write_text((TWO_LEVELS.to_json(), shipped.read_text())[variant])


def read_calibration(path: pathlib.Path) -> None:
    sizes = "Mesh.data = 1", "Mesh.expert = 4", "Mesh.tensor = 2"
    cfg = gin_reader.load(
        [GIN], [*sizes, "Model.num_kv_heads = 2", f"Balance.calibration = '{path}'"]
    )
    cost = make_cost_model(cfg, load_calibration(cfg, "paper"))
    assert cost.flops_per_sec > 0
    assert cost.latency_sec >= 0


def build_trace(folder: pathlib.Path, variant: int) -> None:
    rng = np.random.default_rng(variant)
    tokens = rng.integers(0, 100, (20, 2, 8), dtype=np.uint16)
    (np.savez, np.savez_compressed)[variant](folder / "a.npz", tokens=tokens)


def read_trace(path: pathlib.Path) -> None:
    chance_tle = loads(Recorded(source=str(path)), 3, 8, 2)
    assert np.isfinite(chance_tle).all()
    np.testing.assert_allclose(chance_tle.sum(-1), 2, rtol=1e-4)


def read_corpus(corpus: pathlib.Path, tokenizer: str = "bytes") -> None:
    """Open a corpus as a run does, and read some of its windows."""
    cfg = Data(corpus=str(corpus), seq_len=16, held_out_every=4, tokenizer=tokenizer)
    opened = load_corpus(cfg, 400)
    batches = TrainBatches(opened, cfg, 2)
    num_held_out = opened.num_held_out_tokens // (cfg.seq_len + 1)
    held_out = HeldOut(opened, cfg, 1, min(num_held_out, 10))
    for step in range(2):
        token_bt = batches.rows(step, 0, 2).token_bt
        assert ((token_bt >= 0) & (token_bt < 400)).all()
    for batch in range(held_out.num_batches):
        held_out.rows(batch, 0, 1)
    byte_sample(opened, 1000)


def write_texts(name: str, write: Callable) -> Callable:
    """Return a function that writes a data file of these texts, which two variants have
    in another order."""
    return lambda folder, variant: write(folder / name, TEXTS[:: (1, -1)[variant]] * 3)


def build_prepared(folder: pathlib.Path, variant: int) -> None:
    source = write_jsonl(folder / "a.jsonl", TEXTS[variant:] * 3)
    prepare([source], folder / "out", load_tokenizer("bytes"))


def build_bpe(folder: pathlib.Path, variant: int) -> None:
    (folder / "a.json").write_text(bpe_json(300 + 60 * variant))
    write_jsonl(folder / "a.jsonl")


def build_tensors(folder: pathlib.Path, variant: int) -> None:
    write_shards(folder / "model", make_arrays(variant))


def read_tensors(path: pathlib.Path) -> None:
    """Compare the tensors of a folder with those that safetensors reads."""
    folder = TensorFolder(path.parent)
    index = json.loads((path.parent / INDEX).read_bytes())
    expected = {}
    for file in set(index["weight_map"].values()):
        expected |= safetensors.deserialize((path.parent / file).read_bytes())
    assert folder.arrays.keys() == expected.keys()
    for name, record in expected.items():
        array = folder.view(name).read()
        assert list(array.shape) == record["shape"]
        assert array.tobytes() == bytes(record["data"])


def replace_in_header(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Damage the header of a safetensors file, whose length is then often right."""
    stop, stop_other = (8 + int.from_bytes(x[:8], "little") for x in (whole, other))
    _, header = mutate(whole[8:stop], other[8:stop_other], TEXT, rng)
    length = len(header) if rng.random() < 0.9 else 2 ** rng.randrange(64)
    return length.to_bytes(8, "little") + header + whole[stop:]


def build_models(folder: pathlib.Path, variant: int) -> None:
    file = ("config.json", "config_v4.json")[variant]
    for path in sorted(GOLDEN.glob(f"*/{file}"))[::2]:
        (folder / "model" / path.parent.name).mkdir(parents=True)
        shutil.copy(path, folder / "model" / path.parent.name / "config.json")
    for name in TINY:
        write_tiny(folder / "model" / f"tiny-{name}", name)


def read_model(path: pathlib.Path) -> None:
    """Read a config.json, write it again, and read the tensors beside it."""
    architecture = read_architecture(path.parent)
    make_config(make_network(architecture.fields), record=architecture.record)
    if (path.parent / SINGLE).exists():
        leaves = tree.as_leaves(open_model(path.parent).params).values()
        assert not any(leaf.read().any() for leaf in leaves)


def build_metrics(folder: pathlib.Path, variant: int) -> None:
    lines = balanced_lines(40, DECISIONS if variant == 0 else [])
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def read_metrics(path: pathlib.Path) -> None:
    """Cut the log back, continue and summarise it, as a run does at a new start."""
    cfg = gin_reader.load([ROOT / "tests" / "support" / "balanced.gin"])
    for step in (30, 0):
        with MetricsLog(path) as log:
            log.cut_back(step)
            log.ends_with(step, "eval_loss")
            log.append({"step": step + 1, "loss": 1.0, "device_max_over_mean": [1.0]})
        if summary := summarise_balance(path, cfg):
            json.dumps(summary)
            balance_lines(summary, cfg, "presumed")


def build_checkpoint(folder: pathlib.Path, variant: int) -> None:
    cfg = gin_reader.load([GIN], [f"Train.seed = {variant}"])
    meta = {"format": FORMAT, "config": cfg.to_dict(), "data": {}}
    checkpointer = Checkpointer(folder / "checkpoints", CFG)
    state = {"x": make_state(build_mesh(1, 1), 0)["mask_e"]}
    checkpointer.save(20, state, meta, eval_loss=1.5)
    assert checkpointer.wait()
    checkpointer.close()


def read_record(path: pathlib.Path) -> None:
    """Read the record of a checkpoint as tools and evaluations do."""
    newest_meta(path.parents[2])
    find_checkpoints(path.parents[3])


def read_compiled(path: pathlib.Path) -> None:
    """Run a program from JAX's compilation cache in the folder."""
    names = {
        "jax_compilation_cache_dir": str(path.parent),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    try:
        for name, value in names.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        double = jax.jit(lambda x: 2 * x + 1)  # another function each time
        np.testing.assert_array_equal(double(np.arange(8.0)), 1 + 2 * np.arange(8.0))
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


FORMATS = {
    "gin": Format("a.gin", build_gin, read_gin, TEXT, "a.gin", 200),
    "calibration": Format(
        "a.json", build_calibration, read_calibration, TEXT, "a.json"
    ),
    "trace": Format("a.npz", build_trace, read_trace, BYTES, "a.npz"),
    "jsonl": Format(
        "a.jsonl", write_texts("a.jsonl", write_jsonl), read_corpus, TEXT, "a.jsonl"
    ),
    "jsonl.gz": Format(
        "a.jsonl.gz", write_texts("a.jsonl.gz", write_jsonl), read_corpus, BYTES,
        "a.jsonl.gz", 30,
    ),
    "parquet": Format(
        "a.parquet", write_texts("a.parquet", write_parquet), read_corpus, BYTES,
        "a.parquet", 60,
    ),
    "shards": Format(
        "out/shard-*", build_prepared, lambda path: read_corpus(path.parent), BYTES,
        "/out", 30,
    ),
    "manifest": Format(
        "out/manifest.json", build_prepared, lambda path: read_corpus(path.parent),
        TEXT, "/out",
    ),
    "tokenizer": Format(
        "a.json", build_bpe,
        lambda path: read_corpus(path.with_suffix(".jsonl"), str(path)), TEXT, "a.json",
        30,
    ),
    "tensors": Format(
        "model/*.safetensors", build_tensors, read_tensors,
        (*BYTES, *(replace_in_header,) * 12), "/model", 300,
    ),
    "index of tensors": Format(
        "model/*.json", build_tensors, read_tensors, TEXT, "/model"
    ),
    "config.json": Format(
        "model/*/config.json", build_models, read_model, TEXT, "/model", 150
    ),
    "metrics": Format(
        "metrics.jsonl", build_metrics, read_metrics, TEXT, "metrics.jsonl"
    ),
    "record": Format(
        "checkpoints/20/record/metadata", build_checkpoint, read_record, TEXT,
        "checkpoint",
    ),
    "compiled": Format(
        "*-cache", lambda folder, _: read_compiled(folder / "x"), read_compiled, BYTES,
        "", 10,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_file_is_read_or_refused(name, tmp_path, monkeypatch, capsys):
    form, rng, work = FORMATS[name], random.Random(name), tmp_path / "case"
    monkeypatch.setenv("MOEJAX_CACHE_DIR", str(work / "cache"))
    valid = [tmp_path / "0", tmp_path / "1"]
    for variant, folder in enumerate(valid):
        folder.mkdir()
        form.build(folder, variant)
    wholes = [path.read_bytes() for each in valid for path in each.glob(form.file)]
    for case in range(form.num_cases):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(valid[0], work)
        path, how = rng.choice(sorted(work.glob(form.file))), "nothing"
        if case > 0:  # the first one is valid
            how, data = mutate(
                path.read_bytes(), rng.choice(wholes), form.mutators, rng
            )
            path.write_bytes(data)
        capsys.readouterr()
        with (
            guarded(as_json=False) as ending,
            limited_memory(),
            warnings.catch_warnings(record=True),
        ):
            form.read(path)
        text = "".join(capsys.readouterr())
        assert ending.code in ((0, 2, 3) if case else (0,)), (case, how, text)
        lines = text.splitlines()
        errors = [line for line in lines if line.startswith("error:")]
        assert len(errors) == (ending.code > 0), (case, how, text)
        assert all(form.name in line for line in errors), (case, how, text)
        assert all(len(line) < MAX_LINE + 20 for line in lines), (case, how)
        assert all(line.isprintable() for line in lines), (case, how, text)


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Let the process map no more than ADDRESS_SPACE beside what it has mapped."""
    status = pathlib.Path("/proc/self/status").read_text()
    mapped = 1024 * int(status.split("VmSize:")[1].split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
