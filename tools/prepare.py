"""Turn text, JSONL and parquet files into token shards, once for all later runs.

    python tools/prepare.py 'texts/*.jsonl' --out shards --tokenizer tokenizer.json \\
        --workers 8

Train on them with Data.corpus = 'shards'. Exit codes: 0 done, 2 bad input, 3 the disk
did not take what was written or a worker died, 130 interrupted. Only exit code 0 leaves
a folder.
"""

import argparse
import pathlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# This folder must not be searched, or `import prepare` would find this file.
if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.launch.arguments import new_parser
from train.data.encoding import Recipe
from train.data.prepared import Progress, prepare
from train.data.records import MAX_EXPANSION
from train.launch.program import DONE, emit, guarded
from train.logs.counter import BYTES, counted

SECONDS_BETWEEN_LINES = 10.0


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def work(args: argparse.Namespace) -> int:
    start_sec = time.monotonic()
    recipe = Recipe(
        args.tokenizer,
        int(args.separator) if is_number(args.separator) else args.separator,
        args.text_key,
        args.max_bad_records,
        args.max_expansion,
    )
    with show_progress() as show:
        manifest = prepare(
            args.files, args.out, recipe, args.workers, show, args.overwrite
        )
    report(manifest, args, time.monotonic() - start_sec)
    return DONE


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("files", nargs="+", help="paths and globs of input files, read in this order")
    add(
        "--out",
        required=True,
        help="folder for the shards; it is made, with its parents",
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
    add(
        "--workers",
        type=positive,
        default=1,
        help="number of processes that read and encode",
    )
    add(
        "--max_bad_records",
        type=int,
        default=100,
        help="number of damaged records that are skipped; one more ends the program",
    )
    add(
        "--max_expansion",
        type=positive,
        default=MAX_EXPANSION,
        help="largest ratio of the text in a compressed file to the bytes of the file;"
        " at least 64 MiB of text are always allowed",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace the folder of an earlier run (default: refuse an existing one)",
    )
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """Return the number in `text`. Raises argparse's error if it is less than 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def is_number(text: str | None) -> bool:
    """Return whether `text` consists of the digits 0 to 9."""
    return text is not None and text.isdecimal() and text.isascii()


def report(manifest: dict[str, Any], args: argparse.Namespace, wall_sec: float) -> None:
    """Print the number of documents, tokens and shards that were written, and the time
    and memory that it took."""
    own, children = map(
        resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    cpu_sec = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    num_bytes = sum(source["num_bytes"] for source in manifest["sources"])
    for bad in manifest["bad_records"][:10]:
        print(f"skipped {bad}")
    print(
        f"{args.out}: {manifest['num_documents']:,} documents, "
        f"{manifest['num_tokens']:,} tokens in {len(manifest['shards'])} shards; "
        f"{manifest['num_empty']:,} empty, {manifest['num_bad']:,} bad; "
        f"{num_bytes / 1e6 / wall_sec:,.1f} MB/s, {wall_sec:,.1f} s"
    )
    emit(
        {key: value for key, value in manifest.items() if key.startswith("num_")}
        | {
            "out": str(args.out),
            "num_shards": len(manifest["shards"]),
            "num_bytes": num_bytes,
            "num_workers": args.workers,
            "wall_sec": wall_sec,
            "cpu_sec": cpu_sec,
            "peak_rss_mib": own.ru_maxrss / 1024,
            "worker_peak_rss_mib": children.ru_maxrss / 1024,
            "exit_code": DONE,
        },
        args.json,
    )


@contextmanager
def show_progress() -> Iterator[Callable[[Progress], None]]:
    """Yield a function that shows progress: as a bar on standard error if that is a
    terminal, and as a line every SECONDS_BETWEEN_LINES on standard output unless both
    are."""
    start_sec = time.monotonic()
    print_lines = lines(start_sec)
    is_bar_alone = sys.stdout.isatty() and sys.stderr.isatty()
    with counted("prepare", BYTES) as counter:

        def show(now: Progress) -> None:
            text = counts(now, time.monotonic() - start_sec)
            counter.set(now.num_bytes, now.total_bytes, text)
            if not is_bar_alone:
                print_lines(now)

        yield show


def lines(start_sec: float) -> Callable[[Progress], None]:
    """Return a function that prints progress at most every SECONDS_BETWEEN_LINES."""
    last_sec = start_sec

    def show(now: Progress) -> None:
        nonlocal last_sec
        now_sec = time.monotonic()
        if now_sec - last_sec < SECONDS_BETWEEN_LINES:
            return
        last_sec, taken_sec = now_sec, now_sec - start_sec
        done = now.num_bytes / max(1, now.total_bytes)
        eta = f"{taken_sec / done - taken_sec:,.0f} s" if done else "unknown"
        print(
            f"{now.num_bytes / 1e6:,.0f} of {now.total_bytes / 1e6:,.0f} MB  "
            f"{counts(now, taken_sec)}  ETA {eta}",
            flush=True,
        )

    return show


def counts(now: Progress, taken_sec: float) -> str:
    """Return documents, tokens per second, and bad records if there are any."""
    bad = f"  {now.num_bad:,} bad" if now.num_bad else ""
    rate = now.num_tokens / max(taken_sec, 1e-9)
    return f"{now.num_documents:,} docs  {rate:,.0f} tok/s{bad}"


if __name__ == "__main__":
    sys.exit(main())
