"""Hold the files of a run to their schema."""

import functools
import json
import pathlib
from collections import Counter

import jsonschema

from train.logs import schema

FILES = ("metrics.jsonl", "plans.jsonl", "attempts.jsonl", "goodput.jsonl")


def check_run(run_dir: pathlib.Path) -> Counter:
    """Return the number of lines of each kind in the files of a run, and of its
    summary. Raises jsonschema.ValidationError for one that breaks its schema."""
    counts = Counter()
    for name in FILES:
        for line in (run_dir / name).read_text().splitlines():
            record = json.loads(line)
            kind = kind_of_line(name, record)
            check(kind, record)
            counts[kind] += 1
    if (run_dir / "summary.json").is_file():
        check("summary", json.loads((run_dir / "summary.json").read_text()))
        counts["summary"] += 1
    return counts


def kind_of_line(name: str, record: dict) -> str:
    """Return the definition in the schema for a line of the file `name`."""
    if name == "metrics.jsonl":
        kinds = {"decision": "decision_line", "eval_loss": "evaluation"}
        return next((kinds[field] for field in kinds if field in record), "step")
    if name == "attempts.jsonl":
        return "attempt_end" if "end" in record else "attempt_begin"
    return {"plans.jsonl": "plan", "goodput.jsonl": "goodput_line"}[name]


def check(kind: str, record: dict) -> None:
    """Raise jsonschema.ValidationError if a record breaks the definition `kind`."""
    _validator(kind).validate(record)


@functools.cache
def _validator(kind: str) -> jsonschema.Draft202012Validator:
    whole = schema.load()
    validator = jsonschema.Draft202012Validator
    validator.check_schema(whole)
    return validator({"$ref": f"#/$defs/{kind}", "$defs": whole["$defs"]})
