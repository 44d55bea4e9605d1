"""Test that docs/metrics.md and the schema of a run's files name the same fields."""

import json
import re

import jsonschema
import pytest

from tests.support.metrics_lines import log_lines
from tests.support.run_schema import check
from train.logs import schema
from train.logs.goodput import BUCKETS

SECTIONS = {
    "A training step": "step",
    "An evaluation": "evaluation",
    "A decision of the balancer": "decision",
    "A plan": "plan",
    "The begin of an attempt": "attempt_begin",
    "The end of an attempt": "attempt_end",
    "Goodput": "goodput",
    "A line of the goodput": "goodput_line",
    "The summary": "summary",
    "The balance of the summary": "balance",
}


def documented(page: str, heading: str) -> dict[str, str]:
    """Return the unit of each field in the first table of a section, by name."""
    _, _, section = page.partition(f"\n## {heading}\n")
    rows, units = section.split("\n| field | unit | |\n|---|---|---|\n")[1], {}
    for row in rows.split("\n\n")[0].splitlines():
        _, names, unit, _ = re.split(r"(?<!\\)\|", row, maxsplit=3)
        for name in re.findall(r"`(\w+)`", names):
            assert name not in units, f"{name} is there twice"
            units[name] = unit.strip()
    return units


@pytest.mark.parametrize(("heading", "kind"), SECTIONS.items())
def test_the_docs_name_each_field_with_its_unit(repo, heading, kind):
    page = (repo / "docs" / "metrics.md").read_text()
    fields = schema.load()["$defs"][kind]["properties"]
    assert documented(page, heading) == {n: x["unit"] for n, x in fields.items()}


def test_the_number_is_one():
    whole = schema.load()
    assert whole["schema"] == schema.SCHEMA
    assert whole["$defs"]["attempt_begin"]["properties"]["schema"] == {
        "const": schema.SCHEMA,
        "unit": "",
    }
    assert whole["$defs"]["summary"]["properties"]["schema"]["const"] == schema.SCHEMA


def test_the_buckets_are_those_of_the_goodput():
    assert tuple(schema.load()["$defs"]["buckets"]["properties"]) == BUCKETS


@pytest.mark.parametrize(
    ("kind", "record", "match"),
    [
        ("evaluation", {"step": 1, "eval_loss": "2"}, "'2' is not of type"),
        ("evaluation", {"step": 1}, "'eval_loss' is a required property"),
        ("evaluation", {"step": 1, "eval_loss": 2.0, "loss": 1}, "'loss' was unexpect"),
        ("evaluation", {"step": -1, "eval_loss": None}, "-1 is less than the minimum"),
        ("attempt_end", {"step": 1, "attempt": 1, "at": 1, "end": "x", "why": ""}, "x"),
    ],
)
def test_a_wrong_line_is_refused(kind, record, match):
    with pytest.raises(jsonschema.ValidationError, match=match):
        check(kind, record)


def test_a_line_that_lacks_fields_is_refused():
    with pytest.raises(jsonschema.ValidationError, match="is a required property"):
        check("step", json.loads(log_lines(1)[0]))
