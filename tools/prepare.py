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

# This folder must not be searched, or `import prepare` would find this file.
if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.launch.arguments import new_parser
from train.data.prepared import MANIFEST, prepare
from train.data.tokenizer import load_tokenizer
from train.launch.program import DONE, emit, guarded


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with guarded(as_json=args.json) as ending:
        return work(args)
    return ending.code


def work(args: argparse.Namespace) -> int:
    start_sec = time.monotonic()
    separator = int(args.separator) if is_number(args.separator) else args.separator
    tokenizer = load_tokenizer(args.tokenizer, separator)
    if not prepare(args.files, args.out, tokenizer, args.text_key):
        raise ValueError(f"'{args.out}' exists: name another folder, or remove it")
    manifest = json.loads((args.out / MANIFEST).read_text())
    wall_sec = time.monotonic() - start_sec
    num_bytes = sum(source["num_bytes"] for source in manifest["sources"])
    print(
        f"{args.out}: {manifest['num_documents']:,} documents, "
        f"{manifest['num_tokens']:,} tokens in {len(manifest['shards'])} shards; "
        f"{manifest['num_empty']:,} empty; "
        f"{num_bytes / 1e6 / wall_sec:,.1f} MB/s, {wall_sec:,.1f} s"
    )
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
        default="bytes",
        help="path of a tokenizer.json, or 'bytes' for one token per byte",
    )
    add(
        "--separator",
        help="token, or its id, that starts each document (default: the tokenizer's"
        " own, as with Data.separator = None)",
    )
    add(
        "--text_key",
        default="text",
        help="field of a JSONL record, or column of a parquet file, with the text",
    )
    return parser.parse_args(argv)


def is_number(text: str | None) -> bool:
    """Return whether `text` consists of the digits 0 to 9."""
    return text is not None and text.isdecimal() and text.isascii()


if __name__ == "__main__":
    sys.exit(main())
