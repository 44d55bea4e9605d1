"""Compare two runs: configuration, metrics by step, sample ids and checkpoints by leaf.

    python tools/compare_runs.py runs/a runs/b [--json]

configuration   fields of config.gin that differ, Train.run_dir aside
metrics         lines of metrics.jsonl, by step: training steps, evaluations, decisions
samples         ids of the rows of each batch, where both runs have logged them
checkpoints     checksums of the arrays, for the steps that both runs have saved

Times and rates, such as step_msec, always differ and are not compared. The number of
processes may differ. Nothing is changed, and jax is not needed. Exit codes: 0 the runs
are equal, 1 they differ, 2 bad input.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.launch.arguments import new_parser  # noqa: E402
from train.checkpoint.record import (  # noqa: E402
    DamagedCheckpointError,
    list_steps,
    read_record,
)
from train.config import gin_reader  # noqa: E402
from train.launch.program import BAD_INPUT, DONE, emit, refuse  # noqa: E402
from train.logs.record_lines import kind_of, without_times  # noqa: E402

DIFFERENT = 1
OWN_FIELDS = {"train.run_dir"}
"""Fields of the configuration in which every two runs may differ."""
MAX_SHOWN = 8
MAX_FLOAT = sys.float_info.max

Lines = dict[tuple[int, str], dict[str, Any]]


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        return work(args)
    except (ValueError, OSError) as error:
        return refuse(error, BAD_INPUT, args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = new_parser(__doc__)
    for name in ("run_a", "run_b"):
        parser.add_argument(
            name, type=pathlib.Path, help="run directory of train/main.py"
        )
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    """Compare the two runs, print a table, and return the exit code."""
    runs = args.run_a, args.run_b
    for run in runs:
        if not (run / "config.gin").is_file():
            raise ValueError(f"{run} has no config.gin: name a run directory")
    record = {
        "configuration": compare_configurations(*map(read_configuration, runs)),
        "metrics": compare_lines(*map(read_metrics, runs)),
        "samples": compare_samples(*map(read_samples, runs)),
        "checkpoints": compare_checkpoints(*map(read_checkpoints, runs)),
    }
    are_equal = all(part["is_equal"] for part in record.values())
    show(record)
    emit({"are_equal": are_equal, **record}, args.json)
    return DONE if are_equal else DIFFERENT


def read_configuration(run: pathlib.Path) -> dict[str, Any]:
    """Return every field of a run's configuration, as 'moe.top_k', by name."""
    try:
        parts = gin_reader.load([str(run / "config.gin")], []).to_dict()
    except ValueError as error:
        raise ValueError(f"{run / 'config.gin'} cannot be read: {error}") from error
    return {
        f"{part}.{field}": value
        for part, fields in parts.items()
        for field, value in fields.items()
    }


def read_metrics(run: pathlib.Path) -> Lines:
    """Return the lines of a run's metrics by step and kind, without times."""
    lines: Lines = {}
    for line in _read_lines(run / "metrics.jsonl"):
        lines[line["step"], kind_of(line)] = without_times(line)
    return lines


def read_samples(run: pathlib.Path) -> dict[int, dict[int, Any]] | None:
    """Return the sample id of each row of each step, or None if none were logged."""
    paths = sorted(run.glob("samples-*.jsonl"))
    steps: dict[int, dict[int, Any]] = {}
    for path in paths:
        for line in _read_lines(path):
            try:
                rows = zip(line["rows"], line["ids"], strict=True)
                steps.setdefault(line["step"], {}).update(rows)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path} is damaged: {error!r} in a line") from error
    return steps if paths else None


def read_checkpoints(run: pathlib.Path) -> dict[int, dict[str, dict]]:
    """Return dtype, shape and checksum of each array in each of a run's checkpoints."""
    folder = run / "checkpoints"
    records = {}
    for step in list_steps(folder) if folder.is_dir() else []:
        try:
            records[step] = read_record(folder, step)["arrays"]
        except DamagedCheckpointError as error:
            raise ValueError(f"{folder / str(step)} is damaged: {error}") from error
    return records


def compare_configurations(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that differ, each with both values."""
    different = {
        name: [a.get(name), b.get(name)]
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name) and name not in OWN_FIELDS
    }
    return {"is_equal": not different, "fields": different}


def compare_lines(a: Lines, b: Lines) -> dict[str, Any]:
    """Return where metrics differ: the first step and field, and for each field the
    number of steps and the largest difference.

    The difference of two numbers is absolute; it is None for other values.
    """
    fields: dict[str, dict[str, Any]] = {}
    for key in sorted(a.keys() & b.keys()):
        for name in sorted(a[key].keys() | b[key].keys()):
            pair = a[key].get(name), b[key].get(name)
            if pair[0] != pair[1]:
                field = fields.setdefault(name, {"first_step": key[0], "count": 0})
                field["count"] += 1
                gaps = [field.get("max_difference"), _gap(*pair)]
                known = [gap for gap in gaps if gap is not None]
                field["max_difference"] = max(known, default=None)
    only = [sorted({k[0] for k in x.keys() - y.keys()}) for x, y in ((a, b), (b, a))]
    first = min(fields, key=lambda n: (fields[n]["first_step"], n), default=None)
    return {
        "is_equal": not fields and not any(only),
        "num_common": len(a.keys() & b.keys()),
        "first_field": first,
        "fields": fields,
        "steps_of_one_run": only,
    }


def compare_samples(a: dict | None, b: dict | None) -> dict[str, Any]:
    """Return the steps whose rows had other samples; None if a run logged none."""
    if a is None or b is None:
        return {"is_equal": True, "num_common": 0, "steps": None}
    common = sorted(a.keys() & b.keys())
    different = [step for step in common if a[step] != b[step]]
    return {"is_equal": not different, "num_common": len(common), "steps": different}


def compare_checkpoints(a: dict[int, dict], b: dict[int, dict]) -> dict[str, Any]:
    """Return the arrays that differ, by step, of the checkpoints that both runs have.

    Steps that one run has alone are no difference: old checkpoints are removed.
    """
    common = sorted(a.keys() & b.keys())
    leaves = {
        step: sorted(
            name
            for name in a[step].keys() | b[step].keys()
            if a[step].get(name) != b[step].get(name)
        )
        for step in common
    }
    leaves = {step: names for step, names in leaves.items() if names}
    only = [sorted(x.keys() - y.keys()) for x, y in ((a, b), (b, a))]
    return {
        "is_equal": not leaves,
        "steps": common,
        "leaves": leaves,
        "steps_of_one_run": only,
    }


def show(record: dict[str, dict]) -> None:
    """Print a table of what differs."""
    for part, result in record.items():
        lines = LINES[part](result)
        verdict = "equal" if result["is_equal"] else "DIFFERENT"
        print(f"{part:<15} {verdict:<10} {lines[0]}")
        for line in lines[1 : MAX_SHOWN + 1]:
            print(f"    {line}")
        if len(lines) > MAX_SHOWN + 1:
            print(f"    and {len(lines) - MAX_SHOWN - 1} more (--json has all)")


def _configuration_lines(result: dict) -> list[str]:
    pairs = result["fields"].items()
    lines = [f"{name}: {a!r} and {b!r}" for name, (a, b) in pairs]
    return [f"{len(lines)} fields differ", *lines]


def _metrics_lines(result: dict) -> list[str]:
    head = f"{result['num_common']} lines of both runs"
    if (first := result["first_field"]) is not None:
        step = result["fields"][first]["first_step"]
        head += f"; the first difference is at step {step}, in {first}"
    lines = [head, *_alone(result)]
    for name, field in result["fields"].items():
        gap = field["max_difference"]
        by = "" if gap is None else f", by {gap:.3g} at most"
        line = f"{name}: {field['count']} lines from step {field['first_step']} on{by}"
        lines.append(line)
    return lines


def _samples_lines(result: dict) -> list[str]:
    if (steps := result["steps"]) is None:
        return ["not logged by both runs (Data.log_samples)"]
    first = f"; {len(steps)} differ, step {steps[0]} first" if steps else ""
    return [f"{result['num_common']} steps of both runs{first}"]


def _checkpoint_lines(result: dict) -> list[str]:
    steps = ", ".join(map(str, result["steps"])) or "none"
    leaves = result["leaves"].items()
    lines = [f"step {step}: {name}" for step, names in leaves for name in names]
    return [f"steps of both runs: {steps}", *_alone(result), *lines]


def _alone(result: dict) -> list[str]:
    """Return a line for each run that has steps which the other one has not."""
    return [
        f"steps of run {name} alone: {len(steps)}, {steps[0]} to {steps[-1]}"
        for name, steps in zip("AB", result["steps_of_one_run"])
        if steps
    ]


LINES = {
    "configuration": _configuration_lines,
    "metrics": _metrics_lines,
    "samples": _samples_lines,
    "checkpoints": _checkpoint_lines,
}


def _read_lines(path: pathlib.Path) -> Iterator[dict]:
    """Yield the JSON objects of a file with one per line, each with a whole `step`.

    Raises ValueError for a damaged line.
    """
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record = json.loads(line)
            is_good = isinstance(record["step"], int)
        except (ValueError, TypeError, KeyError, RecursionError):
            is_good = False
        if not is_good:
            raise ValueError(
                f"{path} is damaged: line {number} is no JSON object with a step"
            )
        yield record


def _gap(a: Any, b: Any) -> float | None:
    """Return the largest absolute difference of numbers, or of lists of numbers."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        gaps = [gap for pair in zip(a, b) if (gap := _gap(*pair)) is not None]
        return max(gaps, default=None)
    if all(isinstance(x, int | float) and abs(x) <= MAX_FLOAT for x in (a, b)):
        return abs(float(a) - float(b))
    return None


if __name__ == "__main__":
    sys.exit(main())
