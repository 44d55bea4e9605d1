"""Formats that a program reads: how to write small valid files of each, how to damage
them, and how the program reads them.

Each reader calls what a program calls, down to the use of what was read. Readers may
return normally, or raise what a program answers with one line of an error. They check
what must hold for whatever is read, and then raise AssertionError.
"""

import dataclasses
import functools
import json
import pathlib
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np

from tests.support import mutations
from tests.support.calibrations import TWO_LEVELS
from tests.support.data_files import (
    TEXTS,
    bpe_json,
    write_jsonl,
    write_parquet,
    write_text,
)
from tests.support.metrics_lines import DECISIONS, balanced_lines
from tests.support.mutated_configs import CONFIGS, build_configs, read_configs
from tests.support.mutated_tensors import (
    HEADER,
    TENSOR_INDEX,
    build_tensors,
    read_tensors,
)
from tests.support.mutations import BYTES, GIN, JSON, JSON_LINES, NPZ

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Format:
    """A format, how files of it are made and damaged, and how programs read them."""

    file: str
    """Name of the file that is damaged, or a glob of files, one of which is."""
    build: Callable[[pathlib.Path, int], None]
    """Function of a folder and a variant, 0 or 1, that writes valid files there."""
    read: Callable[[pathlib.Path], object]
    """Function of a folder that reads the files in it."""
    mutators: Sequence[mutations.Mutator]
    num_cases: int
    """Number of damaged files that `make test-all` reads."""
    names: tuple[str, ...]
    """Texts one of which an error must hold, for it names the file."""
    is_report: bool = False
    """Whether the reader prints a report for people, whose lines may be long."""

    def choose(self, folder: pathlib.Path, rng: random.Random) -> pathlib.Path:
        """Return the file in `folder` that is damaged; a larger one more often."""
        paths = sorted(path for path in folder.glob(self.file) if path.is_file())
        assert paths, (folder, self.file)
        return rng.choices(paths, [p.stat().st_size + 300 for p in paths])[0]


# Configurations


def build_gin(folder: pathlib.Path, variant: int) -> None:
    text = (ROOT / "tests" / "support" / "toy.gin").read_text()
    if variant:
        text = (ROOT / "configs" / "tiny_cpu.gin").read_text()
    (folder / "a.gin").write_text(text)


def read_gin(folder: pathlib.Path) -> None:
    from train.config import gin_reader

    cfg = gin_reader.load([folder / "a.gin"])
    (folder / "b.gin").write_text(gin_reader.render(cfg), encoding="utf-8")
    assert gin_reader.load([folder / "b.gin"]) == cfg
    gin_reader.render(cfg, only_changed=True)


def read_sizes(folder: pathlib.Path) -> None:
    """Print what the configuration would need, as --dry_run does."""
    from train.config import gin_reader
    from train.dry_run import dry_run
    from train.launch.program import emit

    emit(dry_run(gin_reader.load([folder / "a.gin"])), True)


def build_gin_param(folder: pathlib.Path, variant: int) -> None:
    binding = ("Train.num_steps = 50", "Data.corpus = ('a.txt', 'b.jsonl')")[variant]
    (folder / "param").write_text(binding)


def read_gin_param(folder: pathlib.Path) -> None:
    from train.config import gin_reader

    param = (folder / "param").read_bytes().decode(errors="surrogateescape")
    cfg = gin_reader.load([ROOT / "tests" / "support" / "toy.gin"], [param])
    gin_reader.render(cfg, only_changed=True)


# Speeds, loads and plans


def build_calibration(folder: pathlib.Path, variant: int) -> None:
    text = TWO_LEVELS.to_json()
    if variant:
        text = (ROOT / "configs" / "skewed_cpu.calibration.json").read_text()
    (folder / "a.json").write_text(text)


@functools.cache
def _calibrated():
    """Return a configuration for the mesh of TWO_LEVELS."""
    from train.config import gin_reader

    sizes = (
        "Mesh.data = 1", "Mesh.expert = 4", "Mesh.tensor = 2", "Model.num_kv_heads = 2",
    )  # fmt: skip
    return gin_reader.load([ROOT / "tests" / "support" / "toy.gin"], sizes)


def read_calibration(folder: pathlib.Path) -> None:
    """Make the cost model that a run makes, and find the lines that its choice of a
    schedule looks for."""
    from moejax.perf.calibration import find_line
    from moejax.resolve.speeds import load_calibration, make_cost_model

    balance = dataclasses.replace(
        _calibrated().balance, calibration=str(folder / "a.json")
    )
    cfg = dataclasses.replace(_calibrated(), balance=balance)
    calibration = load_calibration(cfg, "paper")
    cost = make_cost_model(cfg, calibration)
    assert cost.flops_per_sec > 0
    assert cost.latency_sec >= 0
    for kind, lines in calibration.collectives.items():
        for axis in lines:
            line = find_line(calibration, kind, (axis,))
            assert line["latency_sec"] + 1 / line["bytes_per_sec"] >= 0
    calibration.to_json()


def build_loads(folder: pathlib.Path, variant: int) -> None:
    rng = np.random.default_rng(variant)
    tokens = rng.integers(0, 100, (20, 2, 8), dtype=np.uint16)
    save = (np.savez, np.savez_compressed)[variant]
    save(folder / "a.npz", tokens=tokens, layer=np.arange(2))


def read_loads(folder: pathlib.Path) -> None:
    from moejax.config import Recorded
    from moejax.moe.recorded import loads

    chance_tle = loads(Recorded(source=str(folder / "a.npz")), 3, 8, 2)
    assert np.isfinite(chance_tle).all()
    np.testing.assert_allclose(chance_tle.sum(-1), 2, rtol=1e-4)


# Data


def read_corpus(folder: pathlib.Path, entry: str, tokenizer: str = "bytes") -> None:
    """Open a corpus as a run does, and read each of its windows."""
    from moejax.config import Data
    from train.data import HeldOut, TrainBatches, byte_sample, load_corpus

    cfg = Data(
        corpus=str(folder / entry), seq_len=16, held_out_every=4, tokenizer=tokenizer
    )
    corpus = load_corpus(cfg, 400)
    num_held_out = corpus.num_held_out_tokens // (cfg.seq_len + 1)
    batches = TrainBatches(corpus, cfg, 2)
    held_out = HeldOut(corpus, cfg, 1, min(num_held_out, 100))
    for step in range(min(sum(batches.num_windows) // 2 + 1, 300)):
        tokens = batches.rows(step, 0, 2).token_bt
        assert (tokens >= 0).all()
        assert (tokens < 400).all()
    for batch in range(held_out.num_batches):
        held_out.rows(batch, 0, 1)
    byte_sample(corpus, 1000)


def make_text(texts: Sequence[str], variant: int) -> tuple[str, ...]:
    """Return texts, with more of them than a test of one reader needs."""
    return tuple(texts) * 3 if variant == 0 else tuple(reversed(texts)) * 2


def data_format(name: str, write, mutators, num_cases: int) -> Format:
    """Return the format of one data file that is a corpus by itself."""
    return Format(
        name,
        lambda folder, variant: write(folder / name, make_text(TEXTS, variant)),
        lambda folder: read_corpus(folder, name),
        mutators,
        num_cases,
        (name,),
    )


def build_shards(folder: pathlib.Path, variant: int) -> None:
    from train.data.prepared import prepare
    from train.data.tokenizer import load_tokenizer

    source = write_jsonl(folder / "a.jsonl", make_text(TEXTS, variant))
    prepare([source], folder / "out", load_tokenizer("bytes"))


def build_bpe(folder: pathlib.Path, variant: int) -> None:
    (folder / "a.json").write_text(bpe_json(300 + 60 * variant))
    write_jsonl(folder / "a.jsonl", make_text(TEXTS, variant))


# Run directories


def build_metrics(folder: pathlib.Path, variant: int) -> None:
    lines = balanced_lines(40, DECISIONS if variant == 0 else [])
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    build_gin(folder, 0)
    (folder / "a.gin").rename(folder / "config.gin")


def read_metrics(folder: pathlib.Path) -> None:
    """Summarise and draw the log, cut it back and continue it."""
    from train.config import gin_reader
    from train.logs.balance_summary import balance_lines, summarise_balance
    from train.logs.record_lines import MetricsLog

    path = folder / "metrics.jsonl"
    cfg = gin_reader.load([ROOT / "tests" / "support" / "balanced.gin"])
    for step in (30, 0):
        with MetricsLog(path) as log:
            log.cut_back(step)
            log.ends_with(step, "eval_loss")
            log.append({"step": step + 1, "loss": 1.0, "device_max_over_mean": [1.0]})
        summary = summarise_balance(path, cfg)
        if summary is not None:
            json.dumps(summary)
            balance_lines(summary, cfg, "presumed")


@functools.cache
def _job():
    from moejax.config import Config
    from train.checkpoint.identity import FORMAT

    cfg = Config()
    meta = {"format": FORMAT, "config": cfg.to_dict(), "data": {}}
    return SimpleNamespace(cfg=cfg, meta=meta)


def build_summary(folder: pathlib.Path, variant: int) -> None:
    balance = {"first": 1.0, "last": 1.1, "mean": 1.1, "max": 1.5, "over_time": [1.0]}
    summary = {
        "step": _job().cfg.train.num_steps + variant,
        "eval_loss": 1.5, "trigram_loss": None, "steps_per_sec": 5.0,
        "tok_per_sec": 100.0, "compile_sec": 1.0, "wall_sec": 10.0,
        "balance": {"policy": "home", "device_max_over_mean": balance},
        "load_le": [[1, 2], [3, 4]], "digest": "ab" * 8, "run_dir": str(folder),
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))


def read_summary(folder: pathlib.Path) -> None:
    from train.launch.program import emit
    from train.main import say_finished
    from train.summary import finished_summary

    summary = finished_summary(folder, _job())
    if summary is not None:
        say_finished(summary, _job().cfg)
        emit(summary, True)


# Checkpoints


@functools.cache
def _mesh():
    from tests.support.checkpoint_state import build_mesh

    return build_mesh(2, 1)


def make_toy_state(seed: int) -> dict:
    """Return a state of two small arrays on the devices."""
    import jax

    from moejax.axes import sharding

    rng = np.random.default_rng(seed)
    split = sharding(_mesh(), "expert")
    return {
        "w_ed": jax.device_put(rng.random((8, 16), np.float32), split),
        "step": jax.device_put(np.int32(seed), sharding(_mesh())),
    }


def build_checkpoints(folder: pathlib.Path, variant: int) -> None:
    from moejax import config
    from train.checkpoint.checkpoints import Checkpointer
    from train.config import gin_reader

    cfg = gin_reader.load([ROOT / "tests" / "support" / "toy.gin"])
    meta = _job().meta | {"config": cfg.to_dict()}
    kept = config.Checkpoint(keep_last=2, keep_best=0)
    checkpointer = Checkpointer(folder / "checkpoints", kept)
    for step in (10, 20):
        checkpointer.save(step, make_toy_state(step + variant), meta, eval_loss=1.5)
    assert checkpointer.wait()
    checkpointer.close()


def read_records(folder: pathlib.Path) -> None:
    """Read the records of a run as tools and evaluations do."""
    from train.checkpoint.load import find_checkpoints
    from train.checkpoint.record import newest_meta

    newest_meta(folder / "checkpoints")
    find_checkpoints(folder)


def restore(folder: pathlib.Path) -> None:
    """Restore a checkpoint as a run does; the state must be one that was saved."""
    import jax

    from moejax import config
    from train.checkpoint import identity
    from train.checkpoint.checkpoints import Checkpointer

    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        make_toy_state(0),
    )
    cfg = config.Checkpoint(keep_last=2, keep_best=0)
    checkpointer = Checkpointer(folder / "checkpoints", cfg)
    try:
        restored = checkpointer.restore(target, check=identity.require_format)
    finally:
        checkpointer.close()
    assert restored is not None
    assert restored.step in (10, 20)
    want = make_toy_state(restored.step)
    assert all(
        np.asarray(want[name]).tobytes() == np.asarray(leaf).tobytes()
        for name, leaf in restored.state.items()
    ), "a state that was never saved"


# The compilation cache


def build_compiled(folder: pathlib.Path, variant: int) -> None:
    read_compiled(folder)


def read_compiled(folder: pathlib.Path) -> None:
    """Run two programs from the compilation cache in the folder."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.compilation_cache import compilation_cache

    names = {
        "jax_compilation_cache_dir": str(folder / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    jax.clear_caches()
    compilation_cache.reset_cache()
    try:
        for name, value in names.items():
            jax.config.update(name, value)
        double = jax.jit(lambda x: 2 * x + 1)(np.arange(8, dtype=np.float32))
        total = jax.jit(lambda x, y: jnp.sum(x * y))(np.ones(5), np.ones(5))
        assert np.asarray(double).tolist() == [2 * i + 1 for i in range(8)]
        assert float(total) == 5
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


_CHANGED_LINES = mutations.change_gzipped(JSON_LINES)
_CHANGED_TEXT = mutations.change_gzipped(BYTES)


def _write_one_text(path: pathlib.Path, texts: Sequence[str]) -> None:
    write_text(path, "\n".join(texts))


FORMATS = {
    "gin": Format("a.gin", build_gin, read_gin, GIN, 1500, ("a.gin",)),
    "gin_param": Format(
        "param", build_gin_param, read_gin_param, GIN, 500, ("--gin_param",)
    ),
    "calibration": Format(
        "a.json", build_calibration, read_calibration, JSON, 900, ("a.json",)
    ),
    "loads": Format(
        "a.npz", build_loads, read_loads, (*NPZ * 6, mutations.make_npz_bomb), 800,
        ("a.npz",),
    ),
    "text": data_format("a.txt", _write_one_text, BYTES, 150),
    "text.gz": data_format(
        "a.txt.gz", _write_one_text,
        (*BYTES * 6, *(_CHANGED_TEXT,) * 20, mutations.make_gzip_bomb), 150,
    ),
    "jsonl": data_format("a.jsonl", write_jsonl, JSON_LINES, 700),
    "jsonl.gz": data_format(
        "a.jsonl.gz", write_jsonl,
        (*BYTES * 6, *(_CHANGED_LINES,) * 30, mutations.make_gzip_bomb), 250,
    ),
    "parquet": data_format(
        "a.parquet", write_parquet, (*BYTES * 8, mutations.make_parquet_bomb), 600
    ),
    "shard": Format(
        "out/shard-*", build_shards, lambda folder: read_corpus(folder, "out"), BYTES,
        200, ("shard-00000", "/out"),
    ),
    "manifest": Format(
        "out/manifest.json", build_shards, lambda folder: read_corpus(folder, "out"),
        JSON, 400, ("manifest.json", "/out"),
    ),
    "tokenizer": Format(
        "a.json", build_bpe, lambda f: read_corpus(f, "a.jsonl", str(f / "a.json")),
        JSON, 400, ("a.json",),
    ),
    "tensors": Format(
        "model/*.safetensors", build_tensors, read_tensors, HEADER, 6500, ("/model",),
    ),
    "tensor_index": Format(
        "model/*.json", build_tensors, read_tensors, TENSOR_INDEX, 3500, ("/model",),
    ),
    "model_config": Format(
        "model/*/config.json", build_configs, read_configs, CONFIGS, 10_000,
        ("/model",),
    ),
    # Files that a run writes and caches, and sizes that it computes.
    "sizes": Format(
        "a.gin", build_gin, read_sizes, (mutations.change_gin_number,), 150,
        ("a.gin",), is_report=True,
    ),
    "record": Format(
        "checkpoints/20/record/metadata", build_checkpoints, read_records, JSON, 400,
        ("checkpoint",),
    ),
    "arrays": Format(
        "checkpoints/20/**/*", build_checkpoints, restore, JSON, 150,
        ("checkpoint",),
    ),
    "metrics": Format(
        "metrics.jsonl", build_metrics, read_metrics, JSON_LINES, 500,
        ("metrics.jsonl",),
    ),
    "summary": Format(
        "summary.json", build_summary, read_summary, JSON, 400, ("summary.json",),
        is_report=True,
    ),
    "compiled": Format(
        "compiled/*-cache", build_compiled, read_compiled, BYTES, 100, ("compil",)
    ),
}  # fmt: skip
"""All formats by name."""
