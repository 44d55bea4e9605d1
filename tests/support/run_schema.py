"""Hold the files of a run to the tables of docs/metrics.md."""

import functools
import json
import pathlib
import re
from collections import Counter

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
SECTIONS = {
    "step": "A training step",
    "evaluation": "An evaluation",
    "decision": "A decision of the balancer",
    "plan": "A plan",
    "attempt_begin": "The begin of an attempt",
    "attempt_end": "The end of an attempt",
    "goodput": "Goodput",
    "goodput_line": "A line of the goodput",
    "summary": "The summary",
    "balance": "The balance of the summary",
}
"""Section of the page with the fields of each kind of object."""


def check_run(run_dir: pathlib.Path) -> Counter:
    """Return the number of lines of each kind in the files of a run, and of its
    summary. Raises AssertionError for a field that the page does not name."""
    counts = Counter()
    for name in ("metrics", "plans", "attempts", "goodput"):
        for line in (run_dir / f"{name}.jsonl").read_text().splitlines():
            record = json.loads(line)
            kind = kind_of_line(name, record)
            if kind == "decision_line":
                assert record.keys() == {"step", "decision"}
                check("decision", record["decision"])
            else:
                check(kind, record)
            counts[kind] += 1
    if (run_dir / "summary.json").is_file():
        summary = json.loads((run_dir / "summary.json").read_text())
        check("summary", summary)
        check("goodput", summary["goodput"])
        check("balance", summary["balance"] or {})
        counts["summary"] += 1
    return counts


def kind_of_line(name: str, record: dict) -> str:
    """Return the kind of a line of the file `name`."""
    if name == "metrics":
        kinds = {"decision": "decision_line", "eval_loss": "evaluation"}
        return next((kinds[field] for field in kinds if field in record), "step")
    if name == "attempts":
        return "attempt_end" if "end" in record else "attempt_begin"
    return {"plans": "plan", "goodput": "goodput_line"}[name]


def check(kind: str, record: dict) -> None:
    """Raise AssertionError for a field of a record that the page does not name."""
    unknown = record.keys() - documented(kind)
    assert not unknown, f"docs/metrics.md does not name {unknown} of a {kind}"


@functools.cache
def documented(kind: str) -> frozenset[str]:
    """Return the fields that the first table of the section about `kind` names."""
    _, _, section = PAGE.read_text().partition(f"\n## {SECTIONS[kind]}\n")
    table = section.split("\n| field | unit | |\n|---|---|---|\n")[1].split("\n\n")[0]
    names = [row.split("|")[1] for row in table.splitlines()]
    return frozenset(re.findall(r"`(\w+)`", " ".join(names)))
