"""Continue prompts with a trained model, greedily or by random draws.

    python train/generate.py runs/tiny_cpu --prompt 'import ' --temperature 0.8
    python train/generate.py models/olmoe --prompt 'import '

The model is that of a run, or of a folder as models are published. The text of a single
prompt streams to the terminal; each of several texts is printed when it is complete. A
text ends at the token that separates documents, at another one that a published model
ends its texts with, or after --max_tokens. Exit codes: 0 done, 2 bad input, 130 stopped
by Ctrl-C.
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
    """A prompt and the text that follows it so far."""

    prompt: str
    complete: StreamDecoder
    """Decoder that turns new tokens into the characters that they complete."""
    text: str = ""
    """Text behind the prompt."""
    num_tokens: int = 0
    """Number of tokens behind the prompt, the one that ends the text included."""
    is_ended: bool = False
    """Whether a token that ends texts has ended this one."""

    def add(self, token: int, ends: frozenset[int]) -> str:
        """Add a token; return the characters that it completes, none for one of
        `ends`."""
        self.num_tokens += 1
        self.is_ended = token in ends
        piece = "" if self.is_ended else self.complete([token])
        self.text += piece
        return piece


def main(argv: list[str] | None = None) -> int:
    return cli.run(parse(argv), check, generate, is_program=argv is None)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = cli.make_parser(__doc__)
    add = parser.add_argument
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; several prompts are continued together (default: one "
        "empty prompt, which begins a document)",
    )
    add(
        "--prompt_file",
        action="append",
        default=[],
        metavar="FILE",
        help="file whose whole text is a prompt; may be given several times (default: "
        "none)",
    )
    add(
        "--special_tokens",
        action="store_true",
        help="read names of special tokens in prompts, such as <|im_start|>, as these "
        "tokens (default: as plain text)",
    )
    add(
        "--chat",
        action="store_true",
        help="ask each prompt in the chat template of the model's folder, and end with "
        "the assistant's turn (default: continue the prompt)",
    )
    add(
        "--max_tokens",
        type=int,
        default=200,
        metavar="N",
        help="number of new tokens at most, per prompt (default: %(default)s)",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="divisor of the logits, 0 or more; 0 always takes the likeliest token "
        "(default: %(default)s)",
    )
    add(
        "--top_p",
        type=float,
        default=0.9,
        metavar="P",
        help="draw from the likeliest tokens that together have this probability, "
        "above 0 and at most 1; unused at temperature 0 (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the draws, 0 to 2**32 - 1 (default: %(default)s)",
    )
    return parser.parse_args(argv)


def generate(loaded: LoadedModel, args: argparse.Namespace) -> dict:
    """Print the texts; return them with the tokens per second. Raises ValueError."""
    import numpy as np

    from train.eval.decoding import Sampling, decode, make_decoder

    tokenizer = cli.run_tokenizer(loaded)
    ends, prompts = cli.end_ids(loaded, tokenizer), load_prompts(args)
    if args.chat:
        prompt_ids, turn_ends = ask(loaded, tokenizer, prompts)
        ends |= turn_ends
    else:
        prompt_ids = [encode(tokenizer, text, args.special_tokens) for text in prompts]
    note_length(loaded, prompt_ids, args)
    decoder = make_decoder(loaded, tokenizer.vocab_size, tokenizer.separator)
    sampling = Sampling(args.temperature, args.top_p, args.seed)
    texts = [
        new_continuation(tokenizer, prompt, id_b)
        for prompt, id_b in zip(prompts, prompt_ids)
    ]
    show = Screen(texts) if is_first() else None
    started_sec = first_sec = time.monotonic()
    try:
        for token_b in decode(decoder, prompt_ids, args.max_tokens, sampling):
            if texts[0].num_tokens == 0:
                first_sec = time.monotonic()
            add(texts, np.asarray(token_b).tolist(), ends, args, show)
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
    texts: list[Continuation], tokens: list[int], ends: frozenset[int], args, show
) -> None:
    """Add one token to each text that has not ended, and show it."""
    for row, (text, token) in enumerate(zip(texts, tokens)):
        if not text.is_ended:
            piece = text.add(token, ends)
            is_last = text.is_ended or text.num_tokens == args.max_tokens
            if show:
                show.add(row, piece, is_last)


def check(args: argparse.Namespace) -> None:
    """Raise ValueError where an argument is out of its range."""
    rules = (
        (args.max_tokens >= 1, f"--max_tokens={args.max_tokens} must be at least 1"),
        (
            0 <= args.temperature < math.inf,
            f"--temperature={args.temperature} must be 0 or more, and finite",
        ),
        (0 < args.top_p <= 1, f"--top_p={args.top_p} must be above 0, and at most 1"),
        (0 <= args.seed < 2**32, f"--seed={args.seed} must be 0 .. 2**32 - 1"),
    )
    for is_true, rule in rules:
        if not is_true:
            raise ValueError(rule)


def load_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts, then the texts of the prompt files; one empty prompt where
    there are neither."""
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


def encode(tokenizer: Tokenizer, text: str, has_special_tokens: bool = False):
    """Return the token ids of a prompt, behind the separator of documents.

    `has_special_tokens`: names of special tokens in the prompt stand for them.
    """
    import numpy as np

    if tokenizer.forbidden is not None and tokenizer.forbidden in text:
        raise ValueError(
            f"a prompt contains {tokenizer.forbidden!r}, which separates documents: "
            "remove it"
        )
    encode = tokenizer.encode_special if has_special_tokens else tokenizer.encode
    return np.append(np.int32(tokenizer.separator), encode(text))


def ask(
    loaded: LoadedModel, tokenizer: Tokenizer, prompts: list[str]
) -> tuple[list["np.ndarray"], frozenset[int]]:
    """Return the ids of each prompt as a user's turn, up to the answer, and those that
    end an answer. Raises ValueError where the model's folder has no chat template."""
    from train.data.conversations import as_conversation, load_template

    if loaded.published is None:
        raise ValueError(
            "--chat needs the chat template of a published folder, and this run began "
            "without one: start it with Model.from_hf"
        )
    template, found = load_template(loaded.published), []
    for prompt in prompts:
        pair = as_conversation({"prompt": prompt, "completion": "?"})
        turn = pair | {"messages": pair["messages"][:1]}
        found.append(tokenizer.encode_special(template.render(turn, asks=True)))
    return found, frozenset(tokenizer.encode_special(template.names["eos_token"]))


def new_continuation(
    tokenizer: Tokenizer, prompt: str, id_b: "np.ndarray"
) -> Continuation:
    """Return an empty continuation. Its text is decoded as what follows the prompt, not
    as the beginning of a document."""
    return Continuation(prompt, stream_decoder(tokenizer, context=id_b[1:]))


def note_length(
    loaded: LoadedModel, prompt_ids: list, args: argparse.Namespace
) -> None:
    """Print a note if generated texts can become longer than the windows that the
    model was trained on."""
    length = max(map(len, prompt_ids)) + args.max_tokens
    trained = loaded.cfg.data.seq_len
    if length > trained and loaded.step is not None and is_first():
        say_loudly(
            f"note: texts may have {length} tokens, and the run was trained on "
            f"Data.seq_len={trained}"
        )


class Screen:
    """Terminal output: a single text streams, each of several is printed when it is
    complete."""

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
        """Print the line break after a single text, also if an interrupt stopped it."""
        if len(self._texts) == 1:
            self._write("\n")

    def _write(self, text: str) -> None:
        """Write a text. Control characters, which could steer the terminal, are
        replaced."""
        shown = (c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
        sys.stdout.write("".join(shown))
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
