"""Loss, perplexity and load per expert of a trained model, on held-out text or files.

    python train/evaluate.py runs/tiny_cpu --files 'books/*.txt' --json

Held-out text is the windows that the run was measured on. Of files, every token that
follows another is predicted once, in windows of Data.seq_len. No token is dropped, even
where the run's exchange does. Exit codes: 0 done, 2 bad input, 130 stopped by Ctrl-C.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from train import data, program
from train.data.lines import read_positions, read_tokens
from train.data.tokenizer import Tokenizer
from train.load import Loaded, config_of
from train.processes import is_first
from train.run_dir import say_loudly

if TYPE_CHECKING:
    import numpy as np

    from moejax.types import Windows

CHUNK_TOKENS = 2**15
"""Computed at a time on each device, at most, where that is a window or more."""


def main(argv: list[str] | None = None) -> int:
    return program.run(parse(argv), check, measure, is_program=argv is None)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program.parser_of(__doc__)
    add = parser.add_argument
    add(
        "--files",
        nargs="+",
        default=[],
        help="paths or globs, of any format that Data.corpus takes; default: the "
        "held-out text of the run",
    )
    add("--batches", type=int, help="of held-out text; default: Train.eval_batches")
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    if args.batches is not None and args.batches < 1:
        raise ValueError(f"--batches={args.batches} must be at least 1")
    if args.batches is not None and args.files:
        raise ValueError("--batches is of held-out text, and --files are read whole")


def measure(loaded: Loaded, args: argparse.Namespace) -> dict:
    """Prints the figures and returns them. Raises ValueError."""
    from train.scoring import score

    tokenizer, batch_size = program.tokenizer_of(loaded), batch_size_for(loaded)
    if args.files:
        windows = of_files(loaded, args.files, batch_size)
        text = ", ".join(args.files)
    else:
        windows = of_held_out(loaded, args.batches, batch_size)
        text = "held out by the run"
    bytes_of = Bytes(tokenizer)
    started_sec = time.monotonic()
    found = score(loaded, map(bytes_of.count, windows), tokenizer.separator, batch_size)
    took_sec = time.monotonic() - started_sec
    loss = found.nats / found.num_tokens
    record = {
        "step": loaded.step,
        "text": text,
        "num_tokens": found.num_tokens,
        "num_bytes": bytes_of.num,
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else None,
        "nats_per_byte": found.nats / bytes_of.num,
        "bits_per_byte": found.nats / bytes_of.num / math.log(2),
        "tok_per_sec": found.num_tokens / took_sec,
        "load_le": found.tokens_le.tolist(),
    }
    if is_first():
        show(record, found.tokens_le)
    return record


def batch_size_for(loaded: Loaded) -> int:
    """Rows computed at a time: as in the run's micro-batches, or fewer."""
    train = config_of(loaded.meta["config"]).train
    shards = loaded.cfg.mesh.topology.num_batch_shards
    most = max(1, CHUNK_TOKENS // loaded.cfg.data.seq_len)
    rows = -(-train.batch_size // train.accumulate_steps // shards)
    return shards * min(rows, most)


def of_held_out(
    loaded: Loaded, num_batches: int | None, batch_size: int
) -> Iterator["Windows"]:
    """The windows of the run's own evaluation, whatever the mesh is now."""
    cfg, train = loaded.cfg, config_of(loaded.meta["config"]).train
    corpus = data.load_corpus(cfg.data, cfg.model.vocab_size, say_loudly)
    identity = data.identity(corpus, cfg.data, train.batch_size)
    data.check_identity(loaded.meta["data"], identity)
    micro = train.batch_size // train.accumulate_steps
    count = (num_batches or train.eval_batches) * train.accumulate_steps
    held_out = data.HeldOut(corpus, cfg.data, micro, count)
    for index in range(count):
        for start in range(0, micro, batch_size):
            yield held_out.rows(index, start, min(start + batch_size, micro))


def of_files(loaded: Loaded, files: list[str], batch_size: int) -> Iterator["Windows"]:
    """Windows at stride seq_len of each corpus, the last of what is left."""
    import numpy as np

    from moejax.types import Windows

    cfg = dataclasses.replace(loaded.cfg.data, corpus=tuple(files), weights=None)
    if loaded.cfg.router.kind == "expert_choice":
        raise ValueError(
            "Router.kind='expert_choice' chooses within whole windows, and files end "
            "anywhere: evaluate on the held-out text, without --files"
        )
    _, lines = data.load_whole(cfg, loaded.cfg.model.vocab_size, say_loudly)
    if all(line.num_tokens < 2 for line in lines):
        raise ValueError("--files have no token that follows another: give more text")
    for line in lines:
        num_whole, rest = divmod(max(line.num_tokens - 1, 0), cfg.seq_len)
        start_w = np.arange(num_whole) * cfg.seq_len
        groups = [
            (start_w[first : first + batch_size], cfg.seq_len + 1)
            for first in range(0, num_whole, batch_size)
        ]
        if rest:
            groups.append((np.array([num_whole * cfg.seq_len]), rest + 1))
        for start_w, width in groups:
            token_bt = read_tokens(line, start_w, width)
            position_bt = read_positions(line, start_w, width)
            if cfg.documents == "joined":
                position_bt[:] = np.arange(width)
            yield Windows(token_bt, position_bt)


class Bytes:
    """Counts the text of predicted tokens. A separator counts as one byte, as it does
    where tokens are bytes, so that figures of two tokenizers compare."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.num = tokenizer, 0

    def count(self, windows: "Windows") -> "Windows":
        for token_t in windows.token_bt[:, 1:]:
            self.num += self._of_row(token_t)
        return windows

    def _of_row(self, token_t: "np.ndarray") -> int:
        if self._tokenizer.name == "bytes":
            return token_t.size
        is_text_t = token_t != self._tokenizer.separator
        text = self._tokenizer.decode(token_t[is_text_t])
        return len(text.encode()) + int((~is_text_t).sum())


def show(record: dict, tokens_le: "np.ndarray", say: Callable[[str], None] = print):
    from train.held_out import load_lines

    perplexity = record["perplexity"]
    shown = "more than e700" if perplexity is None else f"{perplexity:.4g}"
    say(f"checkpoint      step {record['step']}")
    say(f"text            {record['text']}")
    num_tokens, num_bytes = record["num_tokens"], record["num_bytes"]
    say(f"predicted       {num_tokens:,} tokens, {num_bytes:,} bytes")
    say(f"loss            {record['loss']:.4f} nats per token, perplexity {shown}")
    nats, bits = record["nats_per_byte"], record["bits_per_byte"]
    say(f"per byte        {nats:.4f} nats, {bits:.4f} bits")
    say(f"throughput      {record['tok_per_sec']:,.0f} tokens/s, with compilation")
    say("load per expert over the mean (' .:-=+*#%@': 0 to 2)")
    for line in load_lines(tokens_le):
        say(line)


if __name__ == "__main__":
    sys.exit(main())
