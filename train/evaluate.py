"""Measure loss, perplexity and load per expert of a trained model.

    python train/evaluate.py runs/tiny_cpu --files 'books/*.txt' --json
    python train/evaluate.py models/olmoe --files 'books/*.txt'

The model is that of a run, or of a folder as models are published. Without --files,
which such a folder needs, the text is the held-out windows that the run's own
evaluations use. In files, each token but the first of a text is predicted once, in
windows of Data.seq_len. No token is dropped, even where the run's exchange drops some.
Exit codes: 0 done, 2 bad input, 130 stopped by Ctrl-C.
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

from train import cli, data
from train.checkpoint.load import LoadedModel, is_folder
from train.config.names import config_from_record
from train.data.token_streams import TokenStream, read_positions, read_tokens
from train.data.tokenizer import Tokenizer, stream_decoder
from train.launch.processes import is_first
from train.launch.program import say_loudly

if TYPE_CHECKING:
    import numpy as np

    from moejax.config import Data
    from moejax.moe.types import Windows

CHUNK_TOKENS = 2**15
"""Maximum number of tokens that a device computes at a time; a single window may have
more."""
PART_TOKENS = 2**16
"""Number of tokens that are decoded at a time."""


def main(argv: list[str] | None = None) -> int:
    return cli.run(parse(argv), check, measure, is_program=argv is None)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.make_parser(__doc__)
    add = parser.add_argument
    add(
        "--files",
        nargs="+",
        default=[],
        metavar="PATH",
        help="paths or globs of files in any format of Data.corpus, read whole "
        "(default: none, but the held-out text of the run)",
    )
    add(
        "--batches",
        type=int,
        metavar="N",
        help="number of held-out batches of Train.batch_size sequences; not with "
        "--files (default: Train.eval_batches)",
    )
    return parser.parse_args(argv)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError for arguments that are out of range or exclude each other."""
    if args.batches is not None and args.batches < 1:
        raise ValueError(f"--batches={args.batches} must be at least 1")
    if args.batches is not None and args.files:
        raise ValueError(
            "--batches counts batches of held-out text, and --files are read whole: "
            "give one of the two"
        )
    if is_folder(args.run_dir) and not args.files:
        raise ValueError(
            f"{args.run_dir} is a published model, without held-out text: "
            "name a text with --files"
        )


def measure(loaded: LoadedModel, args: argparse.Namespace) -> dict:
    """Compute the loss of a model on files or on the held-out text. Print the figures
    and return them. Raises ValueError."""
    from train.eval.scoring import score

    tokenizer, batch_size = cli.run_tokenizer(loaded), batch_size_for(loaded)
    if args.files:
        text, lines = ", ".join(args.files), load_lines(loaded, args.files)
        windows = strided_windows(lines, loaded.cfg.data, batch_size)
    else:
        text, lines = "held out by the run", []
        windows = held_out_windows(loaded, args.batches, batch_size)
    num_bytes = sum(bytes_of_line(tokenizer, line) for line in lines)

    def counted(rows: "Windows") -> "Windows":
        nonlocal num_bytes
        if not lines:
            num_bytes += bytes_of_rows(tokenizer, rows)
        return rows

    started_sec = time.monotonic()
    scores = score(loaded, map(counted, windows), tokenizer, batch_size)
    duration_sec = time.monotonic() - started_sec
    loss = scores.nats / scores.num_tokens
    record = {
        "step": loaded.step,
        "text": text,
        "num_tokens": scores.num_tokens,
        "num_bytes": num_bytes,
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else None,
        "nats_per_byte": scores.nats / num_bytes,
        "bits_per_byte": scores.nats / num_bytes / math.log(2),
        "tok_per_sec": scores.num_tokens / duration_sec,
        "load_le": scores.tokens_le.tolist(),
    }
    if is_first():
        show(record, scores.tokens_le)
    return record


def batch_size_for(loaded: LoadedModel) -> int:
    """Return the number of rows that are computed at a time on all devices: that of the
    run's micro-batches, or fewer where CHUNK_TOKENS limits it."""
    train = config_from_record(loaded.meta["config"]).train
    shards = loaded.cfg.mesh.num_batch_shards
    max_rows = max(1, CHUNK_TOKENS // loaded.cfg.data.seq_len)
    rows = -(-train.batch_size // train.accumulate_steps // shards)
    return shards * min(rows, max_rows)


def held_out_windows(
    loaded: LoadedModel, num_batches: int | None, batch_size: int
) -> Iterator["Windows"]:
    """Yield the windows of the run's own evaluation. They do not depend on the mesh."""
    cfg, train = loaded.cfg, config_from_record(loaded.meta["config"]).train
    corpus = data.load_corpus(cfg.data, cfg.model.vocab_size, say_loudly)
    identity = data.identity(corpus, cfg.data, train.batch_size)
    data.check_identity(loaded.meta["data"], identity)
    micro = train.batch_size // train.accumulate_steps
    count = (num_batches or train.eval_batches) * train.accumulate_steps
    held_out = data.HeldOut(corpus, cfg.data, micro, count)
    for index in range(count):
        for start in range(0, micro, batch_size):
            yield held_out.rows(index, start, min(start + batch_size, micro))


def load_lines(loaded: LoadedModel, files: list[str]) -> list[TokenStream]:
    """Return the tokens of each file or glob as one line of documents. Raises
    ValueError."""
    cfg = dataclasses.replace(loaded.cfg.data, corpus=tuple(files), weights=None)
    _, lines = data.load_unsplit(cfg, loaded.cfg.model.vocab_size, say_loudly)
    if all(line.num_tokens < 2 for line in lines):
        raise ValueError(
            "--files have no token that follows another, so there is nothing to "
            "predict: give more text"
        )
    return lines


def strided_windows(
    lines: list[TokenStream], cfg: "Data", batch_size: int
) -> Iterator["Windows"]:
    """Yield the windows of each line, `seq_len` tokens apart; the last window of a line
    has what is left."""
    import numpy as np

    from moejax.moe.types import Windows

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


def bytes_of_line(tokenizer: Tokenizer, line: TokenStream) -> int:
    """Return the number of bytes of a line's text, without its first token, which is
    not predicted."""
    import numpy as np

    if tokenizer.name == "bytes" or line.num_tokens < 2:
        return max(line.num_tokens - 1, 0)
    given = read_tokens(line, np.zeros(1, int), 1)
    count = Bytes(tokenizer, int(given[0, 0]))
    for first in range(1, line.num_tokens, PART_TOKENS):
        width = min(PART_TOKENS, line.num_tokens - first)
        (token_b,) = read_tokens(line, np.array([first]), width)
        low, high = np.searchsorted(line.start_d, [first, first + width])
        count.add(token_b, line.start_d[low:high] - first)
    count.end()
    return count.num


def bytes_of_rows(tokenizer: Tokenizer, rows: "Windows") -> int:
    """Return the number of bytes of the rows' text, without the first token of each row
    and without the characters that the edges of a row cut."""
    import numpy as np

    if tokenizer.name == "bytes":
        return rows.token_bt[:, 1:].size
    num = 0
    for token_t, position_t in zip(rows.token_bt, rows.position_bt):
        num_cut = _num_cut(tokenizer, token_t)
        given = tokenizer.separator if num_cut else int(token_t[0])
        first = max(1, num_cut)
        count = Bytes(tokenizer, given)
        count.add(token_t[first:], np.flatnonzero(position_t[first:] == 0))
        num += count.num
    return num


def _num_cut(tokenizer: Tokenizer, token_t: "np.ndarray") -> int:
    """Count the tokens at the beginning that are only the rest of a character, whose
    first bytes are cut off. There are at most three."""
    for first in range(4):
        if not tokenizer.decode(token_t[first:][:64]).startswith("\ufffd"):
            return first
    return 0


class Bytes:
    """A counter of the bytes of text that tokens decode to.

    A separator counts as one byte, as it does where tokens are bytes. So the figures of
    two tokenizers can be compared.
    """

    def __init__(self, tokenizer: Tokenizer, given: int) -> None:
        """Begin to count after the token `given`, which is not counted itself."""
        self._tokenizer, self.num = tokenizer, 0
        context = [] if given == tokenizer.separator else [given]
        self._complete = stream_decoder(tokenizer, context)

    def add(self, token_b: "np.ndarray", start_d: "np.ndarray") -> None:
        """Add the bytes of more tokens. `start_d` has the positions among them at which
        documents begin."""
        import numpy as np

        separator_b = token_b == self._tokenizer.separator
        self.num += int(separator_b.sum())
        edges = np.union1d(start_d, np.flatnonzero(separator_b)).astype(int)
        first_b, *others = np.split(token_b, edges)
        self._extend(first_b)
        for part_b in others:
            self.end()
            self._extend(part_b[part_b != self._tokenizer.separator])

    def end(self) -> None:
        """End a document, and add the bytes of its last characters."""
        self.num += len(self._complete([], is_last=True).encode())
        self._complete = stream_decoder(self._tokenizer)

    def _extend(self, token_b: "np.ndarray") -> None:
        self.num += len(self._complete(token_b.tolist()).encode())


def show(record: dict, tokens_le: "np.ndarray", say: Callable[[str], None] = print):
    """Print the figures, and the load of each expert as one character."""
    from train.eval.held_out import format_expert_loads

    perplexity = record["perplexity"]
    shown = "more than e700" if perplexity is None else f"{perplexity:.4g}"
    step = record["step"]
    say("checkpoint      " + ("as published" if step is None else f"step {step}"))
    say(f"text            {record['text']}")
    num_tokens, num_bytes = record["num_tokens"], record["num_bytes"]
    say(f"predicted       {num_tokens:,} tokens, {num_bytes:,} bytes")
    say(f"loss            {record['loss']:.4f} nats per token, perplexity {shown}")
    nats, bits = record["nats_per_byte"], record["bits_per_byte"]
    say(f"per byte        {nats:.4f} nats, {bits:.4f} bits")
    say(f"throughput      {record['tok_per_sec']:,.0f} tokens/s, with compilation")
    say("load per expert over the mean (' .:-=+*#%@': 0 to 2)")
    for line in format_expert_loads(tokens_le):
        say(line)


if __name__ == "__main__":
    sys.exit(main())
