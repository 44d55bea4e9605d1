"""Write small files in every data format, for tests of their readers."""

import functools
import gzip
import json
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = (
    "def f(x):\n    return x + 1\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "数据并行、专家并行。\n",
    "emoji \U0001f600 and \u0301 a combining mark",
    "a",
    "line\r\nbreaks\u2028of other kinds\x0c and \x1f",
)


def write_text(path: Path, text: str = TEXTS[0]) -> Path:
    """Write a text, compressed if the path ends in .gz, and return the path."""
    data = text.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def write_jsonl(path: Path, texts=TEXTS, key: str = "text") -> Path:
    """Write texts as JSON lines with ids and return the path."""
    records = (json.dumps({"id": i, key: text}) for i, text in enumerate(texts))
    return write_text(path, "".join(line + "\n" for line in records))


def write_parquet(path: Path, texts=TEXTS, key: str = "text", rows: int = 2) -> Path:
    """Write texts as a parquet file with `rows` texts per row group; return the
    path."""
    table = pa.table({"id": range(len(texts)), key: pa.array(texts, pa.string())})
    parquet.write_table(table, path, row_group_size=rows)
    return path


@functools.cache
def bpe_json(vocab_size: int = 400) -> str:
    """Return the JSON text of a byte-level BPE tokenizer that was trained on TEXTS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS] * 3, trainer)
    return tokenizer.to_str()


def write_bpe(path: Path) -> Path:
    """Write the tokenizer of `bpe_json` and return the path."""
    path.write_text(bpe_json())
    return path
