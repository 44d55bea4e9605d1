"""A tokenizer in the way of SentencePiece: a space belongs to the word behind it.

The decoder strips the space of the first word. What the vocabulary lacks is bytes.
"""

import functools
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from train.data import tokenizer

WORDS = "hello world the cat, the world: größer 数据 \U0001f600 the cat"


@functools.cache
def metaspace_json() -> str:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256))],
        show_progress=False,
    )
    made.train_from_iterator(["hello world the cat the world"] * 3, trainer)
    return made.to_str()


def load_metaspace(folder: Path) -> tokenizer.Tokenizer:
    path = folder / "metaspace.json"
    path.write_text(metaspace_json())
    return tokenizer.load_tokenizer(str(path))
