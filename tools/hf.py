"""Import published models into runs, export runs as published models, check both, and
make models with experts of dense ones.

    python tools/hf.py check models/olmoe
    python tools/hf.py import models/olmoe --out runs/olmoe
    python tools/hf.py export runs/olmoe --out models/olmoe_mine
    python tools/hf.py logits models/olmoe --ids ids.npy --out logits.npy
    python tools/hf.py upcycle models/llama --experts 8 --top_k 2 --out models/llama_moe

A published model is a folder with config.json, safetensors and perhaps a tokenizer, as
Hugging Face has them. Nothing is downloaded, and pickles are not read. Exit codes: 0
done, 2 bad input, 3 a failure of the machine, 130 interrupted. Only exit code 0 leaves
the output of a command.
"""

import argparse
import pathlib
import sys
from collections.abc import Callable

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from moejax.interop.families import FAMILIES  # noqa: E402
from tools.launch.arguments import HelpFormatter, add_gin_flags  # noqa: E402
from tools.published import (  # noqa: E402
    check,
    export,
    import_run,
    logits,
    upcycle,
)
from train.cli import add_checkpoint_flags  # noqa: E402
from train.config.from_hf import folder_of  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402

Add = Callable[..., argparse.Action]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with guarded(as_json=args.json) as ending:
        emit(args.work(args) | {"exit_code": DONE}, args.json)
    return ending.code


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, module, text: str) -> argparse.ArgumentParser:
        """Add a command, which a module does; return its parser."""
        parser = commands.add_parser(
            name, help=text, description=module.__doc__, formatter_class=HelpFormatter
        )
        parser.set_defaults(work=module.work)
        parser.add_argument(
            "--json",
            action="store_true",
            help="print the result as one JSON object on the last line of stdout",
        )
        return parser

    _add_check(command("check", check, "check a published model").add_argument)
    _add_import(command("import", import_run, "make a run of a published model"))
    _add_export(command("export", export, "publish a run").add_argument)
    _add_logits(command("logits", logits, "compute logits in float32").add_argument)
    text = "make an MoE model of a dense one"
    _add_upcycle(command("upcycle", upcycle, text).add_argument)
    return parser.parse_args(argv)


def _add_check(add: Add) -> None:
    add("folder", type=folder_of, metavar="DIR", help="folder of a published model")
    add(
        "--headers_only",
        action="store_true",
        help="read no tensor (default: read all, and refuse values that are not "
        "finite)",
    )


def _add_import(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("folder", type=folder_of, metavar="DIR", help="folder of a published model")
    add(
        "--out",
        type=folder_of,
        required=True,
        metavar="RUN",
        help="run directory to make; it must not exist, or be empty (required)",
    )
    add_gin_flags(
        parser, "none, all fields that the folder does not decide have their defaults"
    )


def _add_export(add: Add) -> None:
    add("run_dir", type=folder_of, metavar="RUN", help="run directory")
    add(
        "--out",
        type=folder_of,
        required=True,
        metavar="DIR",
        help="folder to write; it must not exist, or be empty (required)",
    )
    add_checkpoint_flags(add)
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="dtype of the tensors (default: that of the model which the run started "
        "from, or else bfloat16)",
    )
    add(
        "--max_shard_gb",
        type=float,
        default=5.0,
        metavar="G",
        help="size of a file of tensors at most, in GB",
    )
    add(
        "--family",
        choices=sorted(FAMILIES),
        metavar="F",
        help=f"family of models to write, one of {', '.join(sorted(FAMILIES))} "
        "(default: that of the model which the run started from, or else the first "
        "that can express the run's)",
    )


def _add_logits(add: Add) -> None:
    add(
        "run_dir",
        type=folder_of,
        metavar="DIR_OR_RUN",
        help="folder of a published model, or run directory",
    )
    add(
        "--ids",
        type=folder_of,
        required=True,
        help=".npy file of token ids, integers [b, t]; each row is a text from its "
        "first token on (required)",
    )
    add(
        "--out",
        type=folder_of,
        required=True,
        help=".npy file for the logits, float32 [b, t, v]; it must not exist "
        "(required)",
    )
    add_checkpoint_flags(add)


def _add_upcycle(add: Add) -> None:
    add("folder", type=folder_of, metavar="DENSE", help="folder of a dense model")
    add(
        "--out",
        type=folder_of,
        required=True,
        metavar="DIR",
        help="folder to write; it must not exist, or be empty (required)",
    )
    add("--experts", type=int, default=8, metavar="E", help="copies of each MLP")
    add(
        "--top_k",
        type=int,
        default=2,
        metavar="K",
        help="copies that compute a token",
    )
    add(
        "--granularity",
        type=int,
        default=1,
        metavar="G",
        help="experts that each copy is cut into: then there are E * G experts, and "
        "K * G compute a token",
    )
    add(
        "--noise",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of each expert's hidden units whose weights are drawn anew; above "
        "0 the model no longer computes what the dense one computes",
    )
    add("--seed", type=int, default=0, help="seed of the router and of the noise")
    add(
        "--dtype",
        choices=("bfloat16", "float32"),
        help="dtype of the tensors (default: one that holds the dense model's)",
    )


if __name__ == "__main__":
    sys.exit(main())
