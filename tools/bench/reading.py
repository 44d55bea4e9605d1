"""Tokens per second of training windows, read from a memory-mapped .bin on one core.

    python tools/bench/reading.py [--json] [--tokens 100000000] [--seq_len 1024]

    copy       the same number of tokens out of the file in order, as int32: the limit
    joined     TrainBatches.rows, positions of the window
    separate   TrainBatches.rows, positions in documents
    sha256     what a file costs once, with its largest id: megabytes per second

Documents have 700 tokens in the mean. The file is made first, and is in the page cache
when it is read. Figures are the best of three by the wall's clock.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable

if __name__ == "__main__":  # this folder would offer its prepare.py to all
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import numpy as np

from moejax.config import Data
from train import data
from train.data.indexed import scan
from train.data.indexed_writer import IndexedWriter

VOCAB_SIZE = 50_000
MEAN_DOCUMENT = 700
BATCH_SIZE = 64


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=int, default=100_000_000, help="of the file")
    add("--seq_len", type=int, default=1024, help="of the windows")
    add("--batches", type=int, default=100, help=f"of {BATCH_SIZE} windows")
    add("--json", action="store_true", help="end with one JSON object on the last line")
    args = parser.parse_args(argv)
    os.environ["JAX_PLATFORMS"] = "cpu"
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOEJAX_CACHE_DIR"] = folder
        record = measure(write(pathlib.Path(folder) / "bench.bin", args.tokens), args)
    for name, rate in record.items():
        print(f"{name:28s} {rate:16,.0f}")
    if args.json:
        print(json.dumps(record), flush=True)
    return 0


def write(path: pathlib.Path, num_tokens: int) -> pathlib.Path:
    rng = np.random.default_rng(0)
    writer = IndexedWriter(path, np.dtype(np.uint16))
    while writer.num_tokens < num_tokens:
        length_d = rng.geometric(1 / MEAN_DOCUMENT, 10_000)
        token_b = rng.integers(0, VOCAB_SIZE, length_d.sum(), np.int32)
        writer.append(token_b, np.cumsum(length_d) - length_d)
    return writer.finish().path


def measure(path: pathlib.Path, args: argparse.Namespace) -> dict[str, float]:
    num_bytes = path.stat().st_size
    token_b = np.memmap(path, np.uint16, "r")
    count = min(token_b.size, args.batches * BATCH_SIZE * (args.seq_len + 1))
    record = {"sha256_mb_per_sec": num_bytes / 1e6 / least_sec(lambda: scan(path))}
    copy_sec = least_sec(lambda: token_b[:count].astype(np.int32))
    record["copy_tok_per_sec"] = count / copy_sec
    for documents in ("joined", "separate"):
        cfg = Data(corpus=str(path), seq_len=args.seq_len, documents=documents)
        corpus = data.load_corpus(cfg, VOCAB_SIZE)
        batches = data.TrainBatches(corpus, cfg, BATCH_SIZE)
        batches.rows(0, 0, BATCH_SIZE)

        def read(batches: data.TrainBatches = batches) -> None:
            for step in range(args.batches):
                batches.rows(step, 0, BATCH_SIZE)

        num_tokens = args.batches * BATCH_SIZE * args.seq_len
        record[f"{documents}_tok_per_sec"] = num_tokens / least_sec(read)
    return record


def least_sec(work: Callable[[], object]) -> float:
    """The least of three."""
    seconds = []
    for _ in range(3):
        start_sec = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_sec)
    return min(seconds)


if __name__ == "__main__":
    sys.exit(main())
