"""Show where the time of a profile went, as a table: a first look without a browser.

    python tools/read_profile.py RUN_DIR/profile/step-10-13 [--json]

kind    the operation: all_to_all, other collectives, dot, while, gather, ..
part    the part of our code that the op comes from: dispatch, experts, combine, ..
busy    milliseconds per device and step in ops of this row, without the ops inside them
waits   the share of `busy`, in milliseconds, that simulated devices were seen waiting
        for others; other devices show none

Exit codes: 0 done, 2 bad input.
"""

import collections
import gzip
import json
import pathlib
import re
import sys
import zlib
from collections.abc import Iterator

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import BAD_INPUT, refuse  # noqa: E402

PARTS = ["later_rounds", "route", "manifest", "slots", "dispatch", "experts"]
PARTS += ["combine", "attention", "dense", "gathered", "embedding", "loss"]
PARTS += ["optimizer"]
KINDS = {
    "all_to_all": r"all[-_]to[-_]all|SendRecv",
    "all_gather": r"all[-_]?gather",
    "reduce_scatter": r"reduce[-_]?scatter",
    "all_reduce": r"all[-_]?reduce|psum",
    "permute": r"collective[-_]permute",
    "dot": r"\bdot|ynn_fusion|gemm|matmul|cutlass|nvjet",
    "sort": r"\bsort",
    "while": r"^while|^conditional",
    "gather": r"gather|scatter",
    "copy": r"copy|memcpy|memset|transpose|concatenate|\bpad|slice",
    "fusion": r"fusion|^wrapped|^call",
}
MAX_USEC = 2**53
"""Largest time in a trace, in microseconds since its start."""
WAITS = re.compile(r"Rendezvous|Wait\b")


def main(argv: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument(
        "trace",
        type=pathlib.Path,
        help="folder that --profile_steps wrote, or a perfetto_trace.json.gz in it",
    )
    args = parser.parse_args(argv)
    try:
        record = read_summary(args.trace)
    except (ValueError, OSError) as error:
        return refuse(error, BAD_INPUT, args.json)
    show(record)
    if args.json:
        print(json.dumps(record))
    return 0


def read_summary(path: pathlib.Path) -> dict:
    """Return the summary of the trace in a folder or file. Raises a ValueError that
    names it where there is none, or where it is damaged."""
    events, op_names = read(path)
    try:
        return summary(events, op_names)
    except ValueError as fault:
        raise ValueError(f"{path}: {fault}") from fault


def read(path: pathlib.Path) -> tuple[list[dict], dict[str, str]]:
    """Return the events of a trace, and the scope in our code of each compiled op.

    Raises ValueError for a path that does not lead to one trace.
    """
    traces = sorted(path.rglob("perfetto_trace.json.gz")) if path.is_dir() else [path]
    if len(traces) != 1:
        folders = ", ".join(str(trace.parent) for trace in traces) or "none"
        raise ValueError(f"{path} must hold one trace: name one of {folders}")
    names = traces[0].with_name("op_names.json.gz")
    try:
        events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
        text = gzip.decompress(names.read_bytes()) if names.is_file() else b"{}"
        events = [event for event in events if isinstance(event, dict)]
        for event in events:
            _check_span(event)
        op_names = dict(json.loads(text))
    except (
        ValueError, KeyError, TypeError, EOFError, OSError, zlib.error, RecursionError,
    ) as fault:  # fmt: skip
        raise ValueError(
            f"{traces[0]} is not a trace of --profile_steps ({fault}): name one"
        ) from fault
    return events, {name: str(scope) for name, scope in op_names.items()}


def _check_span(event: dict) -> None:
    """Raise ValueError for a span whose fields have other types than a profiler
    writes."""
    if event.get("ph") != "X" or "dur" not in event:
        return
    args = event.get("args", {})
    times = [event.get(name) for name in ("ts", "dur")]
    ids = [event.get("pid"), event.get("tid")]
    if not (
        isinstance(event.get("name"), str)
        and isinstance(args, dict)
        and isinstance(args.get("hlo_op", ""), str)
        and all(type(time) in (int, float) and 0 <= time < MAX_USEC for time in times)
        and all(
            type(number) in (int, str, type(None))
            for number in (*ids, args.get("device_ordinal"))
        )
    ):
        raise ValueError(f"a span has fields of other types: {str(event)[:80]}")


def summary(events: list[dict], op_names: dict[str, str]) -> dict:
    """Return the milliseconds per device and step by kind and by part, the longest
    first. Raises ValueError for a trace without steps or ops."""
    spans = [span for span in events if span.get("ph") == "X" and "dur" in span]
    steps = [span for span in spans if span["name"] == "train_step"]
    sums = collections.defaultdict(lambda: [0.0, 0.0, 0])
    devices, end_usec = set(), 0.0
    for span, busy_usec, waits_usec in self_times(spans):
        op = span["args"]["hlo_op"]
        path = op_names.get(op, "")
        devices.add((span.get("pid"), span["args"].get("device_ordinal")))
        end_usec = max(end_usec, span["ts"] + span["dur"])
        kind, part = operation_kind(f"{op} {span['name']}"), layer_part(path)
        for row in (sums["kinds", kind], sums["parts", part]):
            row[:] = row[0] + busy_usec, row[1] + waits_usec, row[2] + 1
    if not steps or not devices:
        raise ValueError(
            f"the trace has {len(steps)} spans 'train_step' and ops of {len(devices)} "
            "devices: take one with --profile_steps"
        )
    record: dict = {
        "num_steps": len(steps),
        "num_devices": len(devices),
        "step_msec": (end_usec - min(s["ts"] for s in steps)) / 1e3 / len(steps),
        "dispatch_msec": sum(step["dur"] for step in steps) / 1e3 / len(steps),
        "kinds": {},
        "parts": {},
    }
    share = 1 / (len(steps) * len(devices))
    for (group, name), row in sorted(sums.items(), key=lambda item: -item[1][0]):
        scaled = (row[0] * share / 1e3, row[1] * share / 1e3, row[2] * share)
        record[group][name] = dict(zip(("busy_msec", "waits_msec", "num_ops"), scaled))
    return record


def self_times(spans: list[dict]) -> Iterator[tuple[dict, float, float]]:
    """Return each op's span, its time outside the ops inside it, and how much of that
    it spent waiting; times are in microseconds."""
    ops: list = []
    open_spans: dict = collections.defaultdict(list)
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        thread = open_spans[span.get("pid"), span.get("tid")]
        while thread and thread[-1][0] <= span["ts"]:
            thread.pop()
        _, inside, is_waiting = thread[-1] if thread else (0, None, False)
        if "hlo_op" in span.get("args", {}):
            if inside is not None:
                inside[1] -= span["dur"]
            inside, is_waiting = [span, span["dur"], 0.0], False
            ops.append(inside)
        elif inside is not None and not is_waiting and WAITS.match(span["name"]):
            inside[2] += span["dur"]
            is_waiting = True
        thread.append((span["ts"] + span["dur"], inside, is_waiting))
    return map(tuple, ops)


def operation_kind(text: str) -> str:
    """Return the first of KINDS whose pattern is in an op's name, or 'other'."""
    kinds = (kind for kind, regex in KINDS.items() if re.search(regex, text, re.I))
    return next(kinds, "other")


def layer_part(path: str) -> str:
    """Return the part of our code that an op comes from, by the path of its scopes.

    'jit(f)/later_rounds/jvp(experts)/dot' is 'later_rounds experts'. A collective that
    XLA inserted for a parameter has the parameter's name, and is 'gathered'.
    """
    if path.startswith("state."):
        return "gathered"
    words = re.findall(r"\w+", path)
    return " ".join([part for part in PARTS if part in words][:2]) or "other"


def show(record: dict) -> None:
    """Print the tables of a record of `summary`."""
    head = "{num_steps} steps of {step_msec:.1f} ms on {num_devices} devices; the host"
    print((head + " dispatched each in {dispatch_msec:.1f} ms").format(**record))
    for group in ("kinds", "parts"):
        total = sum(row["busy_msec"] for row in record[group].values()) or 1.0
        print(f"\n{group[:-1]:22} busy ms  waits ms  share    ops")
        for name, row in record[group].items():
            busy, waits, count = row.values()
            print(
                f"{name:22} {busy:7.2f}  {waits:8.2f} {busy / total:6.1%} {count:6.0f}"
            )


if __name__ == "__main__":
    sys.exit(main())
