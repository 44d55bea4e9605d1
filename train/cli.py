"""Arguments, start and exit codes of the programs that read a checkpoint."""

import argparse
import pathlib
from collections.abc import Callable

from moejax.interop.architecture import CONFIG
from moejax.interop.companions import read_text_ids
from train.checkpoint.load import (
    CheckpointSource,
    FolderSource,
    LoadedModel,
    find_checkpoints,
    find_folder,
    is_folder,
    load_folder,
    load_model,
)
from train.checkpoint.record import has_checkpoint
from train.config import gin_reader
from train.config.from_hf import folder_of, missing_tokenizer
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.launch.agreement import program_facts, require_same
from train.launch.processes import is_first
from train.launch.program import emit, guarded, restart_with_huge_pages, start

MESH_RULE = (
    "without a Mesh binding, the mesh of the run where this machine has as many "
    "devices; else an expert axis of the most devices that divide the experts"
)


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments that these programs share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "run_dir",
        type=folder_of,
        metavar="run_dir",
        help="run directory of train/main.py, where the run may still be going on; or "
        "folder of a published model",
    )
    add_checkpoint_flags(add)
    add(
        "--json",
        action="store_true",
        help="print one JSON object as the last line (default: text alone)",
    )
    return parser


def add_checkpoint_flags(add: Callable[..., argparse.Action]) -> None:
    """Add the arguments that say which checkpoint is read, and on which mesh."""
    add(
        "--step",
        type=int,
        metavar="N",
        help="read the checkpoint of step N (default: the newest undamaged one)",
    )
    add(
        "--gin_param",
        action="append",
        default=[],
        metavar="BINDING",
        help="replace a field of the run's configuration, such as 'Mesh.expert = 2'; "
        f"may be given several times (default: none; {MESH_RULE})",
    )


def run(
    args: argparse.Namespace,
    check: Callable[[argparse.Namespace], None],
    work: Callable[[LoadedModel, argparse.Namespace], dict],
    *,
    is_program: bool,
) -> int:
    """Check the arguments, load the checkpoint, do the work and emit its record. Return
    the exit code.

    A program (`is_program`) may restart itself with other memory settings; a call from
    Python may not.
    """

    with guarded(as_json=args.json) as ending:
        check(args)
        found = find(args.run_dir, args.step, args.gin_param)
        require_tokenizer(found)
        if is_program and found.cfg.train.num_simulated_devices:
            restart_with_huge_pages()
        start(found.cfg)
        require_same("program", _facts(args, found) | program_facts())
        record = work(load(found), args)
        emit(record, args.json and is_first())
    return ending.code


def find(
    path: pathlib.Path, step: int | None, params: list[str]
) -> CheckpointSource | FolderSource:
    """Find the model in a run directory, or in the folder of a published model. Raises
    a ValueError of one line."""
    if is_folder(path):
        return find_folder(path, step, params)
    if not has_checkpoint(path):
        raise ValueError(
            f"{path} has no checkpoints, and no {CONFIG}: name the run directory of a "
            "run of train/main.py that has saved one, or the folder of a published "
            "model"
        )
    return find_checkpoints(path, step, params)


def load(source: CheckpointSource | FolderSource) -> LoadedModel:
    """Load the model that `find` has found onto the devices of this machine."""
    if isinstance(source, FolderSource):
        return load_folder(source)
    return load_model(source)


def require_tokenizer(source: CheckpointSource | FolderSource) -> None:
    """Raise ValueError for a published folder without a tokenizer."""
    if isinstance(source, FolderSource) and (problem := missing_tokenizer(source.cfg)):
        raise ValueError(f"{problem}; tools/hf.py logits needs none")


def _facts(
    args: argparse.Namespace, found: CheckpointSource | FolderSource
) -> dict[str, str]:
    """Return what decides the work of a process beside its program, as texts by name:
    all processes must have the same. Headers of a published folder are read."""
    from train.checkpoint.from_hf import headers_sha256

    is_folder = isinstance(found, FolderSource)
    return {
        "arguments": "\n".join(
            f"{name} = {value}" for name, value in vars(args).items()
        ),
        "configuration": gin_reader.render(found.cfg),
        "tensors": headers_sha256(found.folder) if is_folder else "",
    }


def run_tokenizer(loaded: LoadedModel) -> Tokenizer:
    """Return the tokenizer that the run was trained with, or that of a published
    folder. Raises ValueError where the configured one differs from it."""
    data, identity = loaded.cfg.data, loaded.meta["data"] or {}
    tokenizer = load_tokenizer(data.tokenizer, data.separator, data.end)
    tokenizer.check(loaded.cfg.model.vocab_size)
    here = {
        "tokenizer_sha256": tokenizer.sha256,
        "separator": tokenizer.separator,
        "end": tokenizer.end,
    }
    trained = [identity.get(name, value) for name, value in here.items()]
    if trained != list(here.values()):
        raise ValueError(
            f"Data.tokenizer='{data.tokenizer}' (sha256 {tokenizer.sha256[:12]}, "
            f"separator {tokenizer.separator}, end {tokenizer.end}) is not the run's, "
            f"which has sha256 {trained[0][:12]}, separator {trained[1]} and end "
            f"{trained[2]}: give its path with --gin_param \"Data.tokenizer = '...'\""
        )
    return tokenizer


def end_ids(loaded: LoadedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of the tokens that end a text: the separator of documents, the
    token that ended them in training, and those that a published model names."""
    folder = loaded.published
    ends = set() if folder is None else {*read_text_ids(folder).ends}
    return frozenset(ends | {tokenizer.separator, tokenizer.text_end})
