"""Publish a run: write its newest checkpoint as a folder of safetensors.

Experts are in logical order, whatever the plan and the mesh were. config.json is that
of the model which the run started from, or else made for the first family that can
express the run's; the tokenizer is copied. A run on bytes gets a tokenizer of bytes.
"""

import argparse
import glob
import json
import math
import pathlib
import time
from collections.abc import Callable

from moejax.config import Config, Data
from moejax.interop.architecture import CONFIG
from moejax.interop.companions import (
    GENERATION,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TextIds,
    read_companions,
    read_text_ids,
)
from moejax.interop.export import WRITTEN_DTYPES, Export
from moejax.interop.published import read_architecture
from moejax.interop.write import require_new
from moejax.model.flops import num_params
from train.checkpoint.load import CheckpointSource, find_checkpoints
from train.checkpoint.record import num_written_bytes
from train.config.from_hf import folder_of
from train.data.tokenizer import byte_tokenizer_file, load_tokenizer
from train.launch.program import start
from train.logs.counter import BYTES, counted

PLAIN_TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast"}
"""tokenizer_config.json of a tokenizer.json alone. Without it transformers takes the
class that belongs to model_type, which adds tokens and normalises text."""
DTYPE = "bfloat16"
"""Dtype of the tensors of a model that started from no published one."""


def work(args: argparse.Namespace) -> dict:
    """Write the folder; return the record."""
    if not 0 < args.max_shard_gb < math.inf:
        raise ValueError(
            f"--max_shard_gb={args.max_shard_gb:g} must be above 0, and finite"
        )
    require_new(args.out)
    source = find_checkpoints(args.run_dir, args.step, args.gin_param)
    folder, record, dtype = find_origin(source), None, DTYPE
    if folder is not None:
        architecture = read_architecture(folder)
        record, dtype = architecture.record, architecture.dtype
    files = companions(folder, source.cfg)
    token_ids = trained_token_ids(folder, source.cfg.data)
    start(source.cfg)
    from moejax.interop.published import write_model
    from tools.published.on_devices import as_views
    from train.checkpoint.load import load_model

    begun_sec = time.monotonic()
    with counted("reading the checkpoint", BYTES):
        loaded = load_model(source)
    itemsize = WRITTEN_DTYPES[args.dtype or dtype].itemsize
    total = num_params(loaded.cfg.network)["total"] * itemsize
    with counted("writing", BYTES, total, partial_bytes(args.out)):
        written = write_model(
            args.out,
            loaded.cfg.network,
            as_views(loaded.params),
            as_views(loaded.router_bias),
            family=args.family,
            record=record,
            dtype=args.dtype or dtype,
            max_shard_bytes=int(args.max_shard_gb * 1e9),
            token_ids=token_ids,
            files=files,
        )
    return report(args, written, loaded.step, time.monotonic() - begun_sec)


def partial_bytes(out: pathlib.Path) -> Callable[[], int]:
    """Return a function that returns the bytes of the unfinished folder beside `out`,
    without those that other programs have left."""

    def folders() -> set[pathlib.Path]:
        return set(out.absolute().parent.glob(f"{glob.escape(out.name)}.*.tmp"))

    before = folders()
    return lambda: sum(map(num_written_bytes, folders() - before))


def find_origin(source: CheckpointSource) -> pathlib.Path | None:
    """Return the folder with the config.json of the published model that a run started
    from: the run's own copy, or that which Model.from_hf names. None without one."""
    if source.kept is not None:
        return source.kept
    name = source.cfg.model.from_hf
    has_config = name is not None and (folder_of(name) / CONFIG).exists()
    return folder_of(name) if has_config else None


def companions(folder: pathlib.Path | None, cfg: Config) -> dict[str, bytes]:
    """Return the tokenizer and generation_config.json to publish a run with, by name.

    They are those of `folder`, which the run started from; a tokenizer of its own that
    differs takes the place of all files of the folder's tokenizer, but 'bytes' does
    not; both are printed. A run from no folder has its tokenizer.
    """
    data, name = cfg.data, cfg.model.from_hf
    if folder is None:
        return own_files(data)
    files = read_companions(folder)
    if name is not None and data.tokenizer == str(folder_of(name) / TOKENIZER):
        return files
    if data.tokenizer == "bytes":
        print(f"the run was trained on bytes; tokenizer files are those of {folder}")
        return files
    own = own_files(data)
    if files.get(TOKENIZER) == own[TOKENIZER]:
        return files
    if files.keys() - {GENERATION}:
        print(
            f"the tokenizer is {data.tokenizer}, with which the run was trained; the "
            f"tokenizer's files of {folder} are left out"
        )
    return own | {name: files[name] for name in {GENERATION} & files.keys()}


def own_files(data: Data) -> dict[str, bytes]:
    """Return the tokenizer of a run, and a tokenizer_config.json which says that there
    is nothing else to it."""
    content = byte_tokenizer_file()
    if data.tokenizer != "bytes":
        content = pathlib.Path(data.tokenizer).expanduser().read_bytes()
    plain = (json.dumps(PLAIN_TOKENIZER, indent=2) + "\n").encode()
    return {TOKENIZER: content, TOKENIZER_CONFIG: plain}


def trained_token_ids(folder: pathlib.Path | None, data: Data) -> dict[str, int]:
    """Return the ids of the tokens that began and ended texts in training, where those
    of `folder`, which the run started from, are others; {} where they agree.

    A folder may name several ends: one of them was trained, and all stay. Of a run on
    bytes from a folder, the folder's stay, as its tokenizer does.
    """
    if folder is not None and data.tokenizer == "bytes":
        return {}
    tokenizer = load_tokenizer(data.tokenizer, data.separator, data.end)
    start, end = tokenizer.separator, tokenizer.text_end
    theirs = TextIds(None, ()) if folder is None else read_text_ids(folder)
    ids = theirs.others(start, end)
    if ids and folder is not None:
        print(
            f"texts were trained to begin with token {start} and to end with {end}: "
            f"config.json and {GENERATION} say so, where {folder} says {theirs.start} "
            f"and {', '.join(map(str, theirs.ends)) or 'nothing'}"
        )
    return ids


def report(args: argparse.Namespace, written: Export, step: int, sec: float) -> dict:
    """Print what was written, and return it as a record."""
    num_files, num_bytes = len(written.plan.files), written.plan.num_bytes
    print(
        f"{args.out}: {written.family} of step {step}, {written.dtype}, "
        f"{num_bytes:,} bytes of tensors, files: {num_files}, {sec:.1f} s"
    )
    return {
        "out": str(args.out),
        "step": step,
        "family": written.family,
        "dtype": written.dtype,
        "num_bytes": num_bytes,
        "num_files": num_files,
        "sec": sec,
    }
