"""Token streams against lists of tokens, one document at a time."""

import numpy as np
import pytest

from tests.support.corpora import as_file, random_documents
from train.data.token_streams import (
    join_documents,
    make_token_stream,
    read_positions,
    read_tokens,
    split_held_out,
)


def concatenate(documents):
    return np.concatenate([np.zeros(0, int), *documents])


def positions_by_definition(documents, start, width):
    """Count positions from the later of window start and document start."""
    first = np.repeat(
        np.cumsum([0, *(d.size for d in documents)])[:-1], [d.size for d in documents]
    )
    return [at - max(start, first[at]) for at in range(start, start + width)]


def check(stream, documents, widths):
    expected = concatenate(documents)
    assert stream.num_tokens == expected.size
    for width in widths:
        start_w = np.arange(expected.size - width + 1)
        token_wb = read_tokens(stream, start_w, width)
        position_wb = read_positions(stream, start_w, width)
        assert token_wb.dtype == position_wb.dtype == np.int32
        for start in start_w:
            np.testing.assert_array_equal(
                token_wb[start], expected[start : start + width]
            )
            assert position_wb[start].tolist() == positions_by_definition(
                documents, start, width
            )


@pytest.mark.parametrize(("seed", "held_out_every"), [(0, 2), (1, 3), (2, 7)])
def test_every_window_of_a_split_corpus(seed, held_out_every):
    """Every n-th document of three files is held out, which cuts the runs."""
    documents = random_documents(seed, 40)
    edges = np.sort(np.random.default_rng(seed).integers(1, 39, 2))
    parts = [documents[: edges[0]], documents[edges[0] : edges[1]]]
    files = [as_file(p) for p in [*parts, documents[edges[1] :]] if p]
    train, held_out = split_held_out(files, held_out_every)
    rest = [d for i, d in enumerate(documents) if (i + 1) % held_out_every]
    check(train, rest, [1, 17, 60])
    check(held_out, documents[held_out_every - 1 :: held_out_every], [1, 5, 12])
    check(join_documents(files), documents, [9])


def test_neighbours_make_one_run():
    train, held_out = split_held_out([as_file(random_documents(0, 100))], 10)
    assert train.first_r.size == held_out.first_r.size == 10
    assert train.start_d.size == 90


@pytest.mark.parametrize("held_out_every", [3, 10, 30, 50])
def test_few_documents_hold_out_the_end(held_out_every):
    """The corpus has 30 tokens in 3 files; cuts fall in documents and between files,
    and at 50 nothing is held out."""
    documents = [np.arange(10 * i, 10 * i + 10) for i in range(3)]
    train, held_out = split_held_out([as_file([d]) for d in documents], held_out_every)
    edge = 30 - 30 // held_out_every
    np.testing.assert_array_equal(
        read_tokens(train, [0], edge), [concatenate(documents)[:edge]]
    )
    np.testing.assert_array_equal(
        read_tokens(held_out, [0], 30 - edge), [concatenate(documents)[edge:]]
    )
    assert read_positions(train, [0], edge)[0].tolist() == [i % 10 for i in range(edge)]
    assert (train.num_tokens, held_out.num_tokens) == (edge, 30 - edge)


def test_windows_beyond_the_end_are_refused():
    stream = make_token_stream(np.arange(10), np.zeros(1, int))
    assert read_tokens(stream, np.zeros(0, int), 3).shape == (0, 3)
    for start in (-1, 8):
        with pytest.raises(AssertionError):
            read_tokens(stream, [start], 3)
        with pytest.raises(AssertionError):
            read_positions(stream, [start], 3)
