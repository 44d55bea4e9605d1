"""Test that the memory of the exact exchange is bounded for any skew of the loads."""

import os
import statistics
import subprocess
import sys

import numpy as np
import pytest

from tests.support.memory_probe import inputs, layer_step

BATCH = 64


@pytest.mark.slow
@pytest.mark.long
def test_exact_costs_little_more_than_capacity():
    """The exact exchange needs at most 1.3 times the temporary bytes of capacity mode
    at the same rows_per_peer, in forward and backward."""
    temporary = {}
    for exchange in ("exact", "capacity"):
        step, params, mesh = layer_step(exchange, BATCH)
        compiled = step.lower(params, *inputs(mesh, "one_hot", BATCH)).compile()
        temporary[exchange] = compiled.memory_analysis().temp_size_in_bytes
    assert temporary["exact"] <= 1.3 * temporary["capacity"], temporary


@pytest.mark.slow
@pytest.mark.long
def test_a_hot_expert_takes_no_more_memory(repo):
    """A process whose loads need many rounds has at most 1.1 times the peak resident
    memory of one whose loads need one round."""
    environment = os.environ | {"PYTHONPATH": str(repo)}
    peaks, rounds = {"uniform": [], "one_hot": []}, {}
    for skew in ("uniform", "one_hot") * 2:
        command = [sys.executable, str(repo / "tests/support/memory_probe.py"), skew]
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        )
        _, rounds[skew], _, peak_mib = process.stdout.split()
        peaks[skew].append(float(peak_mib))
    assert int(rounds["uniform"]) == 1
    assert int(rounds["one_hot"]) > 5
    uniform, one_hot = (statistics.median(peaks[skew]) for skew in peaks)
    assert one_hot <= 1.1 * uniform, peaks


@pytest.mark.slow
@pytest.mark.long
def test_capacity_drops_what_exact_carries():
    """Capacity mode needs one round for a hot expert, and counts the rows it drops."""
    step, params, mesh = layer_step("capacity", BATCH)
    _, (rounds, dropped) = step(params, *inputs(mesh, "one_hot", BATCH))
    assert int(rounds) == 1
    choices = np.asarray(inputs(mesh, "one_hot", BATCH)[1])
    assert 0 < int(dropped) < choices.size
