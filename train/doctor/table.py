"""Outcomes of the checks, as a table for people and as a record for scripts."""

from moejax.resolve.resolved import Resolved
from train.doctor.doctor import Report, remedy


def table(report: Report, run: Resolved) -> str:
    """Return the outcomes as a table, with what a run does about those that are
    wrong."""
    width = max((len(x.name) for x in report.outcomes), default=0)
    lines = [f"{'':5}  {'check':{width}}  {'error':>8}  {'allowed':>8}"]
    for each in report.outcomes:
        state = "right" if each.is_right else "WRONG"
        error = f"{each.error:8.2g}  {each.allowed:8.2g}"
        lines.append(f"{state}  {each.name:{width}}  {error}")
    devices = f"{run.mesh.size} x {run.mesh.devices.flat[0].device_kind}"
    count = f"{len(report.outcomes)} checks on {devices} in {report.sec:.1f} s"
    if not report.wrong:
        return "\n".join([*lines, f"{count}: all right"])
    lines.append(f"{count}: {len(report.wrong)} wrong")
    lines += [f"{outcome}: {remedy(outcome)}" for outcome in report.wrong]
    return "\n".join(lines)


def as_record(report: Report) -> dict:
    """Return the outcomes as an object for JSON."""
    return {
        "is_right": not report.wrong,
        "sec": report.sec,
        "checks": [outcome.record() for outcome in report.outcomes],
    }
