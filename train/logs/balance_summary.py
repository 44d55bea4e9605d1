"""Say at the end of a run what balancing has saved, from the run's metrics.jsonl.

The log holds the steps of all attempts, so a run that was stopped and resumed counts as
a whole.
"""

import dataclasses
import pathlib

import numpy as np

from moejax.config import Config
from train.logs.compilation_summary import Beside, compare
from train.logs.record_lines import read_records

RAMP = " .:-=+*#%@"
MAX_COLUMNS = 48
MAX_NUMBER = 1e100
"""Largest value of a metric that is believed: sums of such numbers are finite."""


def summarise_balance(path: pathlib.Path, cfg: Config) -> dict | None:
    """Return the figures of a run's balance from its metrics.jsonl; None without steps.

    A step's ratio is device max/mean, the rows of the fullest device over the mean of
    devices, in the worst layer. With a balancer the same ratio stands beside it for the
    home placement under the same loads.
    """
    ratios, home_ratios, savings_msec, kinds, adopted = {}, {}, [], {}, set()
    dropped_shares, std_ratios = [], []
    step_msecs, collected_steps = {}, {}
    for record in read_records(path):
        if (adoption := _adoption(record.get("decision"))) is not None:
            kinds[adoption[0]] = adoption[1]
            collected_steps.setdefault(adoption[0], record["step"])
        ratio = _largest(record.get("device_max_over_mean"))
        if ratio is None:
            continue
        step = record["step"]
        ratios[step] = ratio
        if (step_msec := _number(record.get("step_msec"))) is not None:
            step_msecs[step] = step_msec
        home_ratio = _largest(record.get("home_device_max_over_mean"))
        if home_ratio is not None:
            home_ratios[step] = home_ratio
        saving_msec = _number(record.get("modelled_saving_msec"))
        if saving_msec is not None:
            savings_msec.append(saving_msec)
        share = _number(record.get("dropped_share"))
        dropped_shares += [] if share is None else [share]
        std_ratios += _numbers(record.get("home_std_over_std"))
        if "adopt_msec" in record:
            adopted.add(step)
    if not ratios:
        return None
    summary = {
        "policy": cfg.balance.policy,
        "device_max_over_mean": _describe(ratios),
        "dropped_share": float(np.mean(dropped_shares)) if dropped_shares else None,
    }
    if cfg.balance.policy == "home":
        return summary
    changes = [kinds.get(step) for step in adopted]
    relayout_steps = [step for step in sorted(adopted) if kinds.get(step) == "relayout"]
    beside = [
        compare(collected_steps[step], step, step_msecs, ratios)
        for step in relayout_steps
    ]
    return summary | {
        "home_device_max_over_mean": _describe(home_ratios) if home_ratios else None,
        "home_std_over_std": float(np.median(std_ratios)) if std_ratios else None,
        "num_swaps": changes.count("swap"),
        "num_relayouts": changes.count("relayout"),
        "modelled_saving_msec": float(np.mean(savings_msec)) if savings_msec else None,
        "while_compiling": [dataclasses.asdict(x) for x in beside if x is not None],
    }


def balance_lines(summary: dict, cfg: Config, speeds: str) -> list[str]:
    """Return the lines that describe a run's balance in its summary. `speeds` says
    where the cost model's speeds are from."""
    ratio = summary["device_max_over_mean"]
    mean = f"device max/mean {ratio['mean']:.2f} on average"
    if summary["policy"] == "home":
        settings = "Balance.policy = 'home'"
        if cfg.dispatch.makes_replicas:
            settings += f", Dispatch.split = '{cfg.dispatch.split}'"
        return [
            f"balancing       none ({settings}): {mean}, {ratio['max']:.2f} at most",
            *_dropped_lines(summary),
        ]
    swaps = count(summary["num_swaps"], "swap")
    relayouts = count(summary["num_relayouts"], "relayout")
    head = f"balancing       {summary['policy']}: {swaps}, {relayouts}; {mean}"
    beside = [Beside(**x).line() for x in summary["while_compiling"]]
    home = summary["home_device_max_over_mean"]
    if home is None:
        return [head, *beside]
    lines = [f"{head}, and {home['mean']:.2f} for the home placement of the same loads"]
    top = max(*ratio["over_time"], *home["over_time"], 1.01)
    scale = f"device max/mean of the worst layer over time ('{RAMP}': 1 to {top:.2f})"
    lines.append(scale)
    for name, row in (("as it ran", ratio), ("home", home)):
        bar = sparkline(row["over_time"], top)
        ends = f"first {row['first']:.2f}  last {row['last']:.2f}"
        lines.append(f"  {name:<9} |{bar}|  {ends}  max {row['max']:.2f}")
    if (std_ratio := summary["home_std_over_std"]) is not None:
        lines.append(
            f"deviation       of devices {std_ratio:.2f} times as large at home, in "
            "the median step and layer (RB)"
        )
    if (saving_msec := summary["modelled_saving_msec"]) is not None:
        lines.append(
            f"modelled saving {saving_msec:.2g} ms per step, beside the home placement "
            f"(speeds {speeds})"
        )
    return lines + beside


def _dropped_lines(summary: dict) -> list[str]:
    """Return the line about choices that capacity mode dropped, if there are any."""
    share = summary["dropped_share"]
    return [f"dropped         {share:.2%} of the choices of experts"] if share else []


def count(number: int, noun: str) -> str:
    """Return a number and a noun, in the plural where it is not one.

    >>> count(1, "swap"), count(2, "swap")
    ('1 swap', '2 swaps')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def sparkline(ratios: list[float], top: float) -> str:
    """Draw ratios from 1 to `top` as text, with a character of RAMP for each.

    >>> sparkline([1.0, 1.5, 2.0], 2.0)
    ' +@'
    """
    share_n = (np.array(ratios) - 1) / (top - 1)
    index_n = np.clip(share_n * len(RAMP), 0, len(RAMP) - 1).astype(int)
    return "".join(RAMP[i] for i in index_n)


def _describe(ratios: dict[int, float]) -> dict:
    """Return the first, last, mean and largest ratio, and means of up to MAX_COLUMNS
    equal parts of the run."""
    ratio_n = np.array([ratios[step] for step in sorted(ratios)])
    parts = np.array_split(ratio_n, min(MAX_COLUMNS, len(ratio_n)))
    return {
        "first": float(ratio_n[0]),
        "last": float(ratio_n[-1]),
        "mean": round(float(ratio_n.mean()), 4),
        "max": float(ratio_n.max()),
        "over_time": [round(float(part.mean()), 3) for part in parts],
    }


def _largest(values) -> float | None:
    """Return the largest of a list of finite numbers; None for anything else, which a
    damaged line may hold."""
    if not isinstance(values, list) or not values:
        return None
    numbers = [_number(value) for value in values]
    return None if None in numbers else max(numbers)


def _numbers(values) -> list[float]:
    """Return the finite numbers of a list, whatever else it holds; none of anything
    else."""
    numbers = map(_number, values) if isinstance(values, list) else []
    return [number for number in numbers if number is not None]


def _number(value) -> float | None:
    """Return a finite number as a float; None for anything else."""
    is_number = type(value) in (int, float) and abs(value) <= MAX_NUMBER
    return float(value) if is_number else None


def _adoption(decision) -> tuple[int, str] | None:
    """Return the step and kind of the change that a decision makes, or None."""
    if not isinstance(decision, dict):
        return None
    step, kind = decision.get("adopt_step"), decision.get("kind")
    is_whole = type(step) is int and isinstance(kind, str)
    return (step, kind) if is_whole and kind != "keep" else None
