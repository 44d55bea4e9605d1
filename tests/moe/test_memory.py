"""Memory of the exact exchange is bounded whatever the skew."""

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
    """Temporary bytes of forward and backward, at the same rows_per_peer."""
    temporary = {}
    for exchange in ("exact", "capacity"):
        step, params, mesh = layer_step(exchange, BATCH)
        compiled = step.lower(params, *inputs(mesh, "one_hot", BATCH)).compile()
        temporary[exchange] = compiled.memory_analysis().temp_size_in_bytes
    assert temporary["exact"] <= 1.3 * temporary["capacity"], temporary


@pytest.mark.slow
@pytest.mark.long
def test_a_hot_expert_takes_no_more_memory(repo):
    """Peak resident memory of whole processes: many rounds against one."""
    environment = os.environ | {"PYTHONPATH": str(repo)}
    peaks, rounds = {"uniform": [], "one_hot": []}, {}
    for skew in ("uniform", "one_hot") * 2:
        command = [sys.executable, str(repo / "tests/support/memory_probe.py"), skew]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        )
        _, rounds[skew], _, peak_mib = done.stdout.split()
        peaks[skew].append(float(peak_mib))
    assert int(rounds["uniform"]) == 1
    assert int(rounds["one_hot"]) > 5
    uniform, one_hot = (statistics.median(peaks[skew]) for skew in peaks)
    assert one_hot <= 1.1 * uniform, peaks


@pytest.mark.slow
@pytest.mark.long
def test_capacity_drops_what_exact_carries():
    """The same hot expert in capacity mode: counted, and only there."""
    step, params, mesh = layer_step("capacity", BATCH)
    _, (rounds, dropped) = step(params, *inputs(mesh, "one_hot", BATCH))
    assert int(rounds) == 1
    choices = np.asarray(inputs(mesh, "one_hot", BATCH)[1])
    assert 0 < int(dropped) < choices.size
