"""Build a small tokenizer that treats spaces as SentencePiece does.

A space belongs to the word after it, and the decoder strips the space of the first
word. Characters that are not in the vocabulary are encoded as bytes.
"""

import functools
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from train.data import tokenizer

WORDS = "hello world the cat, the world: größer 数据 \U0001f600 the cat"


@functools.cache
def metaspace_json() -> str:
    """Return the JSON text of the tokenizer."""
    bpe = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.Metaspace()
    bpe.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    bpe.train_from_iterator(["hello world the cat the world"] * 3, trainer)
    return bpe.to_str()


def load_metaspace(folder: Path) -> tokenizer.Tokenizer:
    """Write the tokenizer into `folder` and load it."""
    path = folder / "metaspace.json"
    path.write_text(metaspace_json())
    return tokenizer.load_tokenizer(str(path))
