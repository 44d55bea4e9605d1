"""Turn text, JSONL and parquet files into token shards, once for all later runs.

    python tools/prepare.py 'texts/*.jsonl' --out shards --tokenizer tokenizer.json

Train on them with Data.corpus = 'shards'. A run that names the files themselves does
the same into a cache. Exit codes: 0 done, 2 bad input, 3 the disk did not take what was
written, 130 interrupted. Only exit code 0 leaves a folder.
"""

import argparse
import json
import pathlib
import sys
import time

import numpy as np

# This folder must not be searched, or `import prepare` would find this file.
if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from moejax.interop.companions import read_text_ids
from tools.launch.arguments import new_parser
from train.data.conversations import Chat, check_tokens, load_template, shown
from train.data.prepared import MANIFEST, open_prepared, prepare
from train.data.tokenizer import Tokenizer, load_tokenizer
from train.launch.program import DONE, emit, guarded


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with guarded(as_json=args.json) as ending:
        return work(args)
    return ending.code


def work(args: argparse.Namespace) -> int:
    start_sec = time.monotonic()
    separator = int(args.separator) if is_number(args.separator) else args.separator
    name = args.tokenizer
    if name is None:
        name = "bytes" if args.chat is None else str(args.chat / "tokenizer.json")
    if separator is None and args.chat is not None:  # as a run from this folder has it
        separator = read_text_ids(args.chat).start
    tokenizer = load_tokenizer(name, separator)
    chat = None
    if args.chat is not None:
        if args.window is None:
            raise ValueError("--chat packs windows: give their --window, Data.seq_len")
        chat = Chat(load_template(args.chat), args.window, args.long)
        check_tokens(chat.template, tokenizer)
    if not prepare(args.files, args.out, tokenizer, args.text_key, chat=chat):
        raise ValueError(f"'{args.out}' exists: name another folder, or remove it")
    manifest = json.loads((args.out / MANIFEST).read_text())
    wall_sec = time.monotonic() - start_sec
    number = f"{manifest['num_documents']:,} documents"
    if chat is not None:
        number = f"{manifest['conversations']['num_conversations']:,} conversations"
    num_bytes = sum(source["num_bytes"] for source in manifest["sources"])
    print(
        f"{args.out}: {number}, "
        f"{manifest['num_tokens']:,} tokens in {len(manifest['shards'])} shards; "
        f"{manifest['num_empty']:,} empty; "
        f"{num_bytes / 1e6 / wall_sec:,.1f} MB/s, {wall_sec:,.1f} s"
    )
    if chat is not None:
        describe(args, manifest, tokenizer)
    emit(
        {key: value for key, value in manifest.items() if key.startswith("num_")}
        | {
            "out": str(args.out),
            "num_shards": len(manifest["shards"]),
            "num_bytes": num_bytes,
            "wall_sec": wall_sec,
            "exit_code": DONE,
        },
        args.json,
    )
    return DONE


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("files", nargs="+", help="paths and globs of input files, read in this order")
    add(
        "--out",
        required=True,
        type=lambda text: pathlib.Path(text).expanduser(),
        help="folder for the shards, which must not exist; its parents are made",
    )
    add(
        "--tokenizer",
        help="path of a tokenizer.json, or 'bytes' for one token per byte (default:"
        " bytes; with --chat the folder's)",
    )
    add(
        "--chat",
        type=lambda text: pathlib.Path(text).expanduser(),
        metavar="FOLDER",
        help="read conversations, by the chat template of this published folder",
    )
    add(
        "--window",
        type=int,
        help="with --chat: tokens of a window, which holds whole conversations;"
        " Data.seq_len of the run",
    )
    add(
        "--long",
        choices=("cut", "skip"),
        default="cut",
        help="with --chat: cut the end of conversations longer than a window, or leave"
        " them out",
    )
    add(
        "--show",
        type=int,
        default=0,
        metavar="N",
        help="with --chat: print the first N windows, with the targets in colour, or in"
        " [[ ]] where there is no terminal",
    )
    add(
        "--separator",
        help="token, or its id, that starts each document (default: the tokenizer's"
        " own, as with Data.separator = None; with --chat the folder's, which fills"
        " windows)",
    )
    add(
        "--text_key",
        default="text",
        help="field of a JSONL record, or column of a parquet file, with the text",
    )
    return parser.parse_args(argv)


def describe(args: argparse.Namespace, manifest: dict, tokenizer: Tokenizer) -> None:
    """Print the counts of conversations, and the first --show windows."""
    found = manifest["conversations"]
    share = found["num_targets"] / manifest["num_tokens"]
    print(
        f"windows of {found['window']} tokens; {found['num_cut']:,} conversations were "
        f"cut, {found['num_skipped']:,} left out; {share:.0%} of the tokens are targets"
    )
    files, _ = open_prepared(args.out, tokenizer)
    for number in range(args.show):
        first = number * found["window"]
        id_b = files[0].token_b[first : first + found["window"]].astype(np.int32)
        if len(id_b):
            print(f"--- window {number}")
            print(shown(tokenizer, id_b, in_colour=sys.stdout.isatty()))


def is_number(text: str | None) -> bool:
    """Return whether `text` consists of the digits 0 to 9."""
    return text is not None and text.isdecimal() and text.isascii()


if __name__ == "__main__":
    sys.exit(main())
