"""Arguments, start and exit codes of the programs that read a checkpoint."""

import argparse
import pathlib
from collections.abc import Callable

from train.checkpoint.load import LoadedModel, find_checkpoints, load_model
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.launch.cluster import add_flags, cluster_flags
from train.launch.processes import is_first
from train.launch.program import DONE, emit, guarded, restart_with_huge_pages, start

MESH_RULE = (
    "without a Mesh.*, where the run's devices are not here, as many as divide the "
    "experts are on the expert axis"
)


def make_parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("run_dir", type=pathlib.Path, help="of a run of train/main.py, even a live one")
    add("--step", type=int, help="of the checkpoint; default: the newest that is whole")
    add(
        "--gin_param",
        action="append",
        default=[],
        help=f"'Mesh.expert = 2', or another field of the run; {MESH_RULE}",
    )
    add("--json", action="store_true", help="end with one JSON object on the last line")
    add_flags(parser)
    return parser


def run(
    args: argparse.Namespace,
    check: Callable[[argparse.Namespace], None],
    work: Callable[[LoadedModel, argparse.Namespace], dict],
    *,
    is_program: bool,
) -> int:
    """Check, load, work and emit work's record; return the exit code. A program, unlike
    a call, may start itself anew."""

    def whole() -> int:
        check(args)
        found = find_checkpoints(args.run_dir, args.step, args.gin_param)
        if is_program and found.cfg.train.num_simulated_devices:
            restart_with_huge_pages()
        start(found.cfg, cluster_flags(args))
        record = work(load_model(found), args)
        emit(record, args.json and is_first())
        return DONE

    return guarded(whole, as_json=args.json)


def run_tokenizer(loaded: LoadedModel) -> Tokenizer:
    """Return the run's own tokenizer; raise ValueError when it is another now."""
    data, identity = loaded.cfg.data, loaded.meta["data"]
    tokenizer = load_tokenizer(data.tokenizer, data.separator)
    here = {"tokenizer_sha256": tokenizer.sha256, "separator": tokenizer.separator}
    trained = [identity.get(name, value) for name, value in here.items()]
    if trained != list(here.values()):
        raise ValueError(
            f"Data.tokenizer='{data.tokenizer}' (sha256 {tokenizer.sha256[:12]}, "
            f"separator {tokenizer.separator}) is not the run's, "
            f"{trained[0][:12]} and {trained[1]}: say where that is with --gin_param"
        )
    return tokenizer
