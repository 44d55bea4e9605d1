"""Continue prompts with a trained model: greedy, or drawn from the likeliest tokens.

    python train/generate.py runs/tiny_cpu --prompt 'import ' --temperature 0.8

One prompt streams to the terminal; of several, each is printed when it is done. A text
ends at the token that separates documents, or after --max_tokens. Without a prompt a
document begins. Exit codes: 0 done, 2 bad input, 130 stopped by Ctrl-C.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
import time
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from train import cli
from train.checkpoint.load import LoadedModel
from train.data.tokenizer import StreamDecoder, Tokenizer, stream_decoder
from train.launch.processes import is_first
from train.launch.program import say_loudly

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass
class Continuation:
    """The text that is made of one prompt."""

    prompt: str
    complete: StreamDecoder
    text: str = ""
    num_tokens: int = 0
    is_ended: bool = False
    """By the separator."""

    def add(self, token: int, separator: int) -> str:
        """Add a token; return the text that it completes."""
        self.num_tokens += 1
        self.is_ended = token == separator
        piece = "" if self.is_ended else self.complete([token])
        self.text += piece
        return piece


def main(argv: list[str] | None = None) -> int:
    return cli.run(parse(argv), check, generate, is_program=argv is None)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.make_parser(__doc__)
    add = parser.add_argument
    add("--prompt", action="append", default=[], help="several are made together")
    add("--prompt_file", action="append", default=[], help="its whole text is a prompt")
    add("--max_tokens", type=int, default=200)
    add("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    add("--top_p", type=float, default=0.9, help="draw from so much of all probability")
    add("--seed", type=int, default=0, help="of what is drawn")
    return parser.parse_args(argv)


def generate(loaded: LoadedModel, args: argparse.Namespace) -> dict:
    """Print the texts, and return them with what it took. Raises ValueError."""
    import numpy as np

    from train.eval.decoding import Sampling, decode, make_decoder

    tokenizer = cli.run_tokenizer(loaded)
    given = load_prompts(args)
    prompts = [encoded(tokenizer, text) for text in given]
    note_length(loaded, prompts, args)
    decoder = make_decoder(loaded, tokenizer.vocab_size, tokenizer.separator)
    how = Sampling(args.temperature, args.top_p, args.seed)
    texts = [begun(tokenizer, *both) for both in zip(given, prompts)]
    show = Screen(texts) if is_first() else None
    started_sec = first_sec = time.monotonic()
    try:
        for token_b in decode(decoder, prompts, args.max_tokens, how):
            if texts[0].num_tokens == 0:
                first_sec = time.monotonic()
            add(texts, np.asarray(token_b).tolist(), decoder.separator, args, show)
            if all(text.is_ended for text in texts):
                break
    finally:
        if show:
            show.end()
    total = sum(text.num_tokens for text in texts)
    took_sec = time.monotonic() - first_sec
    rate = (total - len(texts)) / took_sec if total > len(texts) else None
    if is_first():
        speed = f", then {rate:,.0f} tok/s" if rate else ""
        wait_sec = first_sec - started_sec
        say_loudly(f"{total} tokens; the first after {wait_sec:.1f} s{speed}")
    return {
        "step": loaded.step,
        "texts": [
            {
                "prompt": text.prompt,
                "text": text.text,
                "num_tokens": text.num_tokens,
                "is_ended": text.is_ended,
            }
            for text in texts
        ],
        "tok_per_sec": rate,
    }


def add(
    texts: list[Continuation], tokens: list[int], separator: int, args, show
) -> None:
    """Add a token to every text that has not ended."""
    for row, (text, token) in enumerate(zip(texts, tokens)):
        if not text.is_ended:
            piece = text.add(token, separator)
            is_last = text.is_ended or text.num_tokens == args.max_tokens
            if show:
                show.add(row, piece, is_last)


def check(args: argparse.Namespace) -> None:
    rules = (
        (args.max_tokens >= 1, f"--max_tokens={args.max_tokens} must be at least 1"),
        (
            0 <= args.temperature < math.inf,
            f"--temperature={args.temperature} must be 0 or more, and finite",
        ),
        (0 < args.top_p <= 1, f"--top_p={args.top_p} must be above 0, and at most 1"),
        (0 <= args.seed < 2**32, f"--seed={args.seed} must be 0 .. 2**32 - 1"),
    )
    for is_kept, rule in rules:
        if not is_kept:
            raise ValueError(rule)


def load_prompts(args: argparse.Namespace) -> list[str]:
    """Return prompts, then the texts of files; an empty one where there is neither."""
    texts = list(args.prompt)
    for path in args.prompt_file:
        try:
            texts.append(pathlib.Path(path).read_bytes().decode())
        except OSError as fault:
            raise ValueError(f"--prompt_file {path}: {fault.strerror}") from fault
        except UnicodeDecodeError as fault:
            raise ValueError(
                f"--prompt_file {path}: byte {fault.start} is not UTF-8 text"
            ) from fault
    return texts or [""]


def encoded(tokenizer: Tokenizer, text: str):
    """Return the ids of a prompt, which begins with the separator of documents."""
    import numpy as np

    if tokenizer.forbidden is not None and tokenizer.forbidden in text:
        raise ValueError(
            f"a prompt holds the separator {tokenizer.forbidden!r} of documents: take "
            "it out"
        )
    return np.append(np.int32(tokenizer.separator), tokenizer.encode(text))


def begun(tokenizer: Tokenizer, prompt: str, id_b: "np.ndarray") -> Continuation:
    """Return an empty text behind that of the prompt, and not behind a separator."""
    return Continuation(prompt, stream_decoder(tokenizer, context=id_b[1:]))


def note_length(loaded: LoadedModel, prompts: list, args: argparse.Namespace) -> None:
    length, trained = max(map(len, prompts)) + args.max_tokens, loaded.cfg.data.seq_len
    if length > trained and is_first():
        say_loudly(
            f"note: up to {length} tokens, and the run has seen Data.seq_len={trained} "
            "at a time"
        )


class Screen:
    """One text as it comes; of several, each when it is done."""

    def __init__(self, texts: list[Continuation]) -> None:
        self._texts = texts
        sys.stdout.reconfigure(errors="replace")
        if len(texts) == 1:
            self._write(texts[0].prompt)

    def add(self, row: int, piece: str, is_last: bool) -> None:
        if len(self._texts) == 1:
            self._write(piece)
        elif is_last:
            text = self._texts[row]
            self._write(f"--- prompt {row}\n{text.prompt}{text.text}\n")

    def end(self) -> None:
        """End the line, whatever has ended the text."""
        if len(self._texts) == 1:
            self._write("\n")

    def _write(self, text: str) -> None:
        """Write a text without the characters by which it could steer the terminal."""
        shown = (c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        sys.stdout.write("".join(shown))
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
