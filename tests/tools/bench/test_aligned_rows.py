"""Test costs and savings of aligned groups: counts by hand, by the tables that the
kernels read, and the table of docs/kernels.md."""

import json

import jax
import numpy as np
import pytest

from moejax.kernels.grouped_dot.hopper.row_tiles import GROUP, HIGH, LOW, row_tiles
from moejax.kernels.grouped_dot.hopper.wgrad_kernel import STEPS, groups_table
from moejax.kernels.shapes import MODEL_SHAPES, ProductShape
from moejax.kernels.tuning import Tiles
from tools.bench import aligned_rows
from tools.bench.aligned_rows import Tally, cost, draw_rows, parts_of_tiles, tally

IN_COLUMNS, IN_ROWS = Tiles(64, 128, halves="columns"), Tiles(128, 128)


def test_parts_are_counted_by_hand():
    """Group 0 has rows 0 to 70 and group 2 rows 70 to 128. Tiles of 64 rows begin at 0,
    64 and 64, and the last two store 6 and 58 rows: 4 + 2, and 32 + 16 + 8 + 2. Results
    of 128 columns have four chunks."""
    actual = tally(np.array([70, 0, 58]), 128, IN_COLUMNS, 64)
    assert actual == Tally(3, 2, (2 + 4) * 4, steps=3, blanked_steps=2)
    # Warpgroups have rows 0 to 64 and 64 to 128 of a tile. Of the second tile, rows 6
    # to 64 are stored by the first warpgroup alone.
    actual = tally(np.array([70, 0, 58]), 128, IN_ROWS, 64)
    assert actual == Tally(2, 2, (2 + 4) * 4, steps=3, blanked_steps=2)
    actual = tally(np.array([128, 0, 64]), 128, IN_COLUMNS, 64)
    assert actual == Tally(3, 0, 0, steps=3, blanked_steps=0)


def test_tiles_are_those_of_the_kernels_tables():
    rng = np.random.default_rng(0)
    tables = [jax.jit(f, static_argnums=(1, 2)) for f in (row_tiles, groups_table)]
    for rows in (64, 128):
        rows_g = (rng.integers(0, 3, 9) * rng.integers(0, 200, 9)).astype(np.int32)
        num_rows = int(rows_g.sum())
        table, count = map(np.asarray, tables[0](rows_g, num_rows, rows))
        table = table[:, : int(count[0])]
        assert (table[GROUP] < len(rows_g)).all()
        for actual, expected in zip(parts_of_tiles(rows_g, rows), table[[LOW, HIGH]]):
            assert actual.tolist() == expected.tolist()
        steps = np.asarray(tables[1](rows_g, num_rows, rows))[STEPS].sum()
        assert steps == len(parts_of_tiles(rows_g, rows)[0])


def test_costs_of_a_layer_by_hand():
    shape = ProductShape(rows=300, d=64, f=32, groups=3)
    actual = cost(shape, draw_rows("worst", shape), 64)
    assert (actual.zero_rows, actual.buffer_rows) == (63 + 63 + 22, 148)
    assert actual.permuted_mib * 2**20 == 2 * 148 * 64 * 2
    assert actual.multiplied_mib * 2**20 == 2 * 148 * (6 * 32 + 2 * 64 + 4 * 64 + 256)


@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_aligned_tiles_are_whole_and_no_more(name):
    shape = MODEL_SHAPES[name]
    for load in aligned_rows.LOADS:
        rows_g = draw_rows(load, shape)
        assert rows_g.sum() == shape.rows
        actual = cost(shape, rows_g, 128)
        aligned = actual.aligned
        assert 0 == aligned.part_tiles == aligned.part_copies == aligned.blanked_steps
        assert actual.zero_rows <= actual.buffer_rows < 128 * shape.groups
        assert (load != "worst") or actual.zero_rows == actual.buffer_rows


def test_the_page_has_the_table_of_the_program(repo, capsys):
    assert aligned_rows.main(["--json"]) == 0
    *table, record = capsys.readouterr().out.strip().splitlines()
    assert "\n".join(table) in (repo / "docs" / "kernels.md").read_text()
    rows = json.loads(record)["rows"]
    assert len(rows) == len(MODEL_SHAPES) * len(aligned_rows.DEVICES) * 3
    for row in rows:  # tiles that divide the multiple never compute more rows
        assert row["aligned"]["tiles"] <= row["first"]["tiles"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--shapes", "olmo"], ["--shapes=olmo", "olmoe_1b_7b"]),
        (["--align", "64"], ["--align 64", "128 rows of a tile", "use --align 128"]),
    ],
)
def test_bad_input_is_one_line(argv, words, capsys):
    assert aligned_rows.main(argv) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert [word for word in words if word not in line] == []
