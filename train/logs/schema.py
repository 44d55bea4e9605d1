"""The schema of a run's files: JSON Schema of their lines, in run_schema.json.

docs/metrics.md describes the same fields in words.
"""

import json
import pathlib
from typing import Any

SCHEMA = 2
"""Number of the schema, which rises when a field gets another meaning or goes away. A
run without attempts.jsonl has schema 1."""
FILE = pathlib.Path(__file__).with_name("run_schema.json")


def load() -> dict[str, Any]:
    """Return the JSON Schema whose "$defs" hold one schema for each kind of line, and
    one for summary.json.

    Each field has a "unit" beside its type; "" is a field without one.
    """
    return json.loads(FILE.read_text())
