"""Data: from files to the windows of a step.

documents -> encoding -> prepared     text to token shards, once (tools/prepare.py)
indexed -> lines                      token files as one line of documents
corpus                                what Data.corpus names, checked and split
mixture -> windows                    which tokens the rows of a step are
"""

from train.data.corpus import Corpus, byte_sample, load_corpus, load_whole
from train.data.data_identity import check_identity, identity
from train.data.windows import HeldOut, TrainBatches

__all__ = [
    "Corpus", "HeldOut", "TrainBatches", "byte_sample", "check_identity", "identity",
    "load_corpus", "load_whole",
]  # fmt: skip
