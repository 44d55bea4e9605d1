"""Memory and collectives of the GPU configurations, compiled whole, equal golden
files."""

import json

import pytest

from tests.support.aot import run_aot

TOLERANCE = 0.02
"""Relative. Another version of XLA may lay buffers out in another order."""

FLOAT32 = (
    "largest_float32_collective_bytes",
    "largest_float32_reduce_scatter_bytes",
)


@pytest.mark.long
@pytest.mark.aot
@pytest.mark.parametrize(
    ("name", "nodes"), [("olmoe_1b_7b", 1), ("qwen3_30b_a3b", 2), ("mixtral_8x7b", 2)]
)
def test_a_configuration(repo, name, nodes):
    """This command writes a new golden file, to review before it replaces the old one:

    python tools/aot.py --gin_file=configs/olmoe_1b_7b.gin --json | tail -n 1 |
        python -m json.tool > tests/golden/aot_olmoe_1b_7b.json
    """
    golden = json.loads((repo / f"tests/golden/aot_{name}.json").read_text())
    _, record = run_aot(f"--gin_file={repo}/configs/{name}.gin", f"--nodes={nodes}")
    assert record["mesh"] == golden["mesh"]
    assert record["peak_gib"] == pytest.approx(golden["peak_gib"], rel=TOLERANCE)
    for field in ("num_remat_ops", "remat_collectives", *FLOAT32):
        assert record[field] == golden[field]
    for field in ("exchange_hidden_share", "collective_hidden_share"):
        assert record[field] == pytest.approx(golden[field], abs=TOLERANCE)
    slack = TOLERANCE * golden["peak_gib"]
    assert record["memory_gib"] == pytest.approx(golden["memory_gib"], abs=slack)
