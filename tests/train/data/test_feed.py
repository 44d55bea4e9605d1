"""Batches on devices: the rows of a step, of which each process reads its own."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from moejax.config import Data
from tests.support.corpora import make_corpus, random_documents
from train.data import TrainBatches
from train.data.feed import feed, own_rows

BATCH = 16


class Counted:
    """A source that lists the rows it is asked for."""

    def __init__(self, source):
        self.source, self.spans = source, []

    def rows(self, step, start, stop):
        self.spans.append((start, stop))
        return self.source.rows(step, start, stop)


class OneProcess:
    """The sharding as one of several processes sees it, with devices of its own."""

    def __init__(self, sharding, devices):
        self.sharding, self.devices = sharding, devices

    def addressable_devices_indices_map(self, shape):
        indices = self.sharding.devices_indices_map(shape)
        return {device: indices[device] for device in self.devices}


@pytest.fixture
def sharding():
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"))
    return NamedSharding(mesh, PartitionSpec(None, ("data", "expert")))


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_batch_on_devices_is_the_batch(sharding, micro_batches):
    corpus = make_corpus([random_documents(0, 200)], held_out_every=4)
    batches = TrainBatches(corpus, Data(seq_len=8), BATCH)
    source = Counted(batches)
    windows = feed(source, 3, BATCH, micro_batches, sharding)
    whole = batches.rows(3, 0, BATCH)
    for name in ("token_bt", "position_bt"):
        array = getattr(windows, name)
        assert array.shape == (micro_batches, BATCH // micro_batches, 9)
        np.testing.assert_array_equal(
            np.asarray(array).reshape(BATCH, 9), getattr(whole, name)
        )
    read = [row for span in source.spans[1:] for row in range(*span)]
    assert sorted(read) == list(range(BATCH)), "each row is read once"


@pytest.mark.parametrize(("num_processes", "micro_batches"), [(1, 2), (2, 1), (4, 4)])
def test_processes_read_every_row_once(sharding, num_processes, micro_batches):
    """Each has a block of whole tensor groups, as on machines with several devices."""
    devices = np.split(sharding.mesh.devices.ravel(), num_processes)
    rows = [
        own_rows(BATCH, micro_batches, OneProcess(sharding, part)) for part in devices
    ]
    assert all(part == sorted(part) for part in rows)
    assert {len(part) for part in rows} == {BATCH // num_processes}
    assert sorted(row for part in rows for row in part) == list(range(BATCH))
