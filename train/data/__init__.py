"""Data loading: from files on disk to the token windows of a training step.

records -> jsonl, parquet -> documents   read files as a stream of documents
tokenizer -> encoding -> prepared        tokenize text into shards once, as
                                         tools/prepare.py does
indexed -> token_streams                 map token files, and view their documents as
                                         one stream of tokens
cache, pysrc -> corpus                   open, check and split the corpora that
                                         Data.corpus names
mixture -> windows -> feed               choose the tokens of each row of a step

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
