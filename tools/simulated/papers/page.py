"""The page docs/papers.md: every table, row by row, and what is reproduced."""

import dataclasses

from tools.simulated.papers import balancing, clocks, hybridep, others, parm
from tools.simulated.papers.row import TOLERANCE, Table, markdown

INTRODUCTION = f"""\
# The papers' tables beside our price

This page answers: which published figures of the five systems does the price by which a
run decides reproduce, and which not, and why?

```
python tools/simulate.py papers --out docs/papers.md
```

A generated page. A *price* is a prediction of the cost model that chooses communication
schedules, domains and policies in training (`moejax/perf`), at the rates of the cluster
that the paper describes (`moejax/perf/clusters`). A figure counts as reproduced if the
price is within {TOLERANCE:.0%} of it, where nothing else is said. Settings that a paper
does not give are marked as ours, stated once for a table, and fitted to no row; where
one was changed after a first price, both are here. The summary counts numbers, not rows
of a formula. Nothing on this page was measured on the papers' machines.
"""
PARTS = {
    "HybridEP": (hybridep, "arXiv 2510.19470"),
    "Parm": (parm, "arXiv 2407.00599"),
    "Pro-Prophet, FlexMoE and MicroMoE": (
        balancing, "arXiv 2411.10003, 2304.03946 and 2511.16947",
    ),
}  # fmt: skip


def make() -> tuple[str, dict]:
    """Return the page as Markdown, and its rows as plain data."""
    found = {name: module.tables() for name, (module, _) in PARTS.items()}
    every = [table for tables in found.values() for table in tables]
    parts = [INTRODUCTION, _summary(every)]
    for name, tables in found.items():
        parts.append(f"## {name}\n\n{PARTS[name][1]}.\n")
        parts += [markdown(table) + "\n" for table in tables]
    parts.append(f"## Our own clocks\n\n{clocks.markdown()}")
    parts.append(f"## Systems named beside them\n\n{others.markdown()}\n")
    return "\n".join(parts), _record(every)


def _counts(table: Table) -> tuple[int, int]:
    """Return how many figures of a table are reproduced, and how many are not. Rows of
    words, such as those of a formula, count as none."""
    verdicts = [row.verdict for row in table.rows if row.ratio is not None]
    return verdicts.count("yes"), verdicts.count("no")


def _summary(every: list[Table]) -> str:
    lines = ["| table | reproduced | not |", "|---|--:|--:|"]
    for table in every:
        yes, no = _counts(table)
        if yes + no:
            lines.append(f"| {table.title} | {yes} | {no} |")
    yes, no = (sum(x) for x in zip(*map(_counts, every)))
    lines.append(f"| all | {yes} | {no} |")
    return "\n".join(lines) + "\n"


def _record(every: list[Table]) -> dict:
    cells = clocks.cells()
    return {
        "tables": [
            {
                "title": table.title,
                "rows": [
                    dataclasses.asdict(row) | {"verdict": row.verdict}
                    for row in table.rows
                ],
            }
            for table in every
        ],
        "clocks": {
            "correlation": clocks.correlation(cells),
            "right": sum(cell.is_right for cell in cells),
            "cells": len(cells),
        },
    }
