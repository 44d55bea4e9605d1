"""The tables of a report."""

import pytest

from tools.compiled import report
from tools.compiled.report import Table, travel_table

ROW = {
    "kind": "all-to-all",
    "dtypes": "bf16",
    "num_bytes": 3 * 2**20,
    "axes": ["data", "expert"],
    "runs": 4,
    "seconds": 0.002,
    "exposed_sec": 0.0015,
    "is_async": True,
    "is_ours": True,
    "hidden_share": 0.25,
    "phase": "forward",
    "scope": "dispatch",
    "source": "moejax/moe/exchange/transport.py:35",
    "beside": {"experts": 1.0},
}


class Rows:
    """Stands for an exposure.Summary."""

    def __init__(self, **changes):
        self._changes = changes

    def rows(self) -> list[dict]:
        return [ROW | self._changes]

    def totals(self) -> list[str]:
        return ["hidden: all", "largest: none"]


@pytest.mark.parametrize(
    ("changes", "column", "cell"),
    [
        ({}, "collective", "all-to-all"),
        ({"is_ours": False}, "collective", "all-to-all (partitioner)"),
        ({}, "MiB", "3.00"),
        ({}, "exposed ms", "1.50"),
        ({}, "ms", "2.00"),
        ({}, "axes", "data expert"),
        ({}, "hidden", "25.0 %"),
        ({"is_async": False}, "hidden", "synchronous"),
        ({"hidden_share": None, "runs": 0}, "hidden", "-"),
        ({"phase": "", "scope": "optimizer"}, "where", "optimizer"),
        ({"source": "", "beside": {}}, "source", "-"),
        ({"source": "", "beside": {}}, "longest beside it", "-"),
    ],
)
def test_a_row_of_the_table_of_collectives(changes, column, cell):
    table = travel_table(Rows(**changes))
    ((*cells,),) = table.rows
    assert dict(zip(table.columns, cells, strict=True))[column] == cell


def test_numbers_are_flush_right():
    table = Table("sizes", ("GiB", "kind"), (("1.00", "slots"), ("10.00", "masters")))
    assert report._text_of(table).splitlines() == [
        "sizes",
        "  GiB  kind",
        " 1.00  slots",
        "10.00  masters",
    ]
