"""Data loading: from files on disk to the token windows of a training step.

documents, tokenizer -> prepared     read files as a stream of documents, and tokenize
                                     it into shards once, as tools/prepare.py does
conversations -> prepared            the same of conversations, by a chat template, with
                                     marks on the tokens that are targets
shards -> token_streams              verify and map shards, and view their documents as
                                     one stream of tokens
pysrc, prepared -> corpus            open and split the corpora that Data.corpus names
mixture, permutation -> windows      choose the tokens of each row of a step
feed                                 put rows on devices

Nothing in this package computes on a device; only `feed` puts rows there.
"""

from train.data.corpus import (
    Corpus,
    byte_sample,
    check_identity,
    identity,
    load_corpus,
    load_unsplit,
)
from train.data.windows import HeldOut, TrainBatches

__all__ = [
    "Corpus", "HeldOut", "TrainBatches", "byte_sample", "check_identity", "identity",
    "load_corpus", "load_unsplit",
]  # fmt: skip
