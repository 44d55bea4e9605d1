"""Print a record of tools/kernel_code.py as a golden file: a kernel a line.

python tools/kernel_code.py --others all --json | tail -n 1 |
    python -m tests.support.golden_kernel_code > tests/golden/kernel_code/default.json
"""

import json
import sys


def text(record: dict) -> str:
    """Return the record as JSON whose kernels have one line each."""
    rows = ",\n".join(f"  {json.dumps(row)}" for row in record["kernels"])
    about = {name: value for name, value in record.items() if name != "kernels"}
    head = json.dumps(about, indent=1).removesuffix("\n}")
    return f'{head},\n "kernels": [\n{rows}\n ]\n}}\n'


if __name__ == "__main__":
    sys.stdout.write(text(json.load(sys.stdin)))
