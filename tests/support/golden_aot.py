"""Print the part of a record of tools/aot.py that a golden file keeps.

tail -n 1 output | python -m tests.support.golden_aot
"""

import json
import sys

KEPT = (
    "gin_files",
    "gin_params",
    "nodes",
    "target",
    "mesh",
    "peak_gib",
    "fits",
    "memory_gib",
    "exchange_hidden_share",
    "collective_hidden_share",
    "num_xla_remat_ops",
    "attention_calls",
    "warnings",
)


def kept(record: dict) -> dict:
    """Return the fields of a record that another compilation must repeat."""
    return {name: record[name] for name in KEPT}


if __name__ == "__main__":
    print(json.dumps(kept(json.load(sys.stdin)), indent=2))
