"""Build small corpora for tests, as arrays or as files."""

import numpy as np

from train.data.corpus import Corpus, Source
from train.data.shards import TokenFile
from train.data.token_streams import split_held_out
from train.data.tokenizer import load_tokenizer


def random_documents(seed, num_documents, longest=9, largest=250):
    """Return token ids of random documents.

    Every document begins with 0, the separator. Some have no other token.
    """
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, longest, num_documents)
    return [np.append(0, rng.integers(1, largest, size)) for size in sizes]


def as_file(documents):
    """Return documents as the reader of a shard returns them."""
    token_b = np.concatenate(documents).astype(np.uint16)
    sizes = np.array([document.size for document in documents])
    return TokenFile(token_b, np.cumsum(sizes) - sizes)


def make_corpus(*parts, held_out_every, weights=None):
    """Return a corpus of several sources. Each of `parts` is one source: a list of
    files, each a list of documents."""
    sources = []
    for i, files in enumerate(parts):
        streams = split_held_out(
            [as_file(documents) for documents in files], held_out_every
        )
        sources.append(Source(f"part{i}", f"{i}" * 64, *streams))
    weights = weights or [source.train.num_tokens for source in sources]
    shares = tuple(weight / sum(weights) for weight in weights)
    return Corpus(tuple(sources), shares, load_tokenizer("bytes"))
