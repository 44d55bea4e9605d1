"""Data: from files to the windows of a step.

records -> jsonl, parquet -> documents   files as a stream of documents
tokenizer -> encoding -> prepared        text to token shards, once (tools/prepare.py)
indexed -> lines                         token files, as one line of documents
cache, pysrc -> corpus                   what Data.corpus names, checked and split
mixture -> windows -> feed               which tokens the rows of a step are

Nothing here computes on a device; `feed` alone puts rows there.
"""

from train.data.corpus import (
    Corpus,
    byte_sample,
    check_identity,
    identity,
    load_corpus,
    load_whole,
)
from train.data.windows import HeldOut, TrainBatches

__all__ = [
    "Corpus", "HeldOut", "TrainBatches", "byte_sample", "check_identity", "identity",
    "load_corpus", "load_whole",
]  # fmt: skip
