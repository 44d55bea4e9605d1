"""Say at the end of a run what balancing has saved, from the run's metrics.jsonl.

The log holds the steps of all attempts, so a run that was stopped and resumed counts as
a whole.
"""

import pathlib

import jax
import numpy as np

from moejax.config import Config
from train.logs.record_lines import read_records

RAMP = " .:-=+*#%@"
MAX_COLUMNS = 48
MAX_NUMBER = 1e100
"""Largest value of a metric that is believed: sums of such numbers are finite."""
MAX_STEP = 10**7
"""Largest step of an adoption that is believed."""
MIN_STEPS = 5
"""Fewest steps before the first change with which the later ones are compared. The
first two of a run are not among them."""


def summarise_balance(path: pathlib.Path, cfg: Config) -> dict | None:
    """Return the figures of a run's balance from its metrics.jsonl; None without steps.

    A step's ratio is device max/mean, the rows of the fullest device over the mean of
    devices, in the worst layer. With a balancer the same ratio stands beside it for the
    home placement under the same loads.
    """
    ratios, home_ratios, kinds, adopted, compiling = {}, {}, {}, set(), set()
    msec, modelled_msec = {}, {}
    savings_msec, dropped_shares, std_ratios = [], [], []
    for record in read_records(path):
        if isinstance(decision := record.get("decision"), dict):
            step, kind = decision.get("adopt_step"), decision.get("kind")
            if type(step) is int and kind in ("swap", "relayout"):
                kinds[step] = kind
                if kind == "relayout" and type(decision.get("step")) is int:
                    compiling.update(range(decision["step"] + 1, min(step, MAX_STEP)))
        if not (ratio_l := _numbers(record.get("device_max_over_mean"))):
            continue
        step = record["step"]
        ratios[step] = max(ratio_l)
        if step_msec := _numbers([record.get("step_msec")]):
            msec[step] = step_msec[0]
        if modelled := _numbers([record.get("modelled_step_msec")]):
            modelled_msec[step] = modelled[0]
        if home_ratio_l := _numbers(record.get("home_device_max_over_mean")):
            home_ratios[step] = max(home_ratio_l)
        savings_msec += _numbers([record.get("modelled_saving_msec")])
        dropped_shares += _numbers([record.get("dropped_share")])
        std_ratios += _numbers(record.get("home_std_over_std"))
        if "adopt_msec" in record:
            adopted.add(step)
    if not ratios:
        return None
    summary = {
        "policy": cfg.balance.policy,
        "device_max_over_mean": _describe(ratios),
        "dropped_share": float(np.mean(dropped_shares)) if dropped_shares else None,
        "priced": _priced(msec, modelled_msec),
    }
    if cfg.balance.policy == "home":
        return summary
    changes = [kinds.get(step) for step in adopted]
    return summary | {
        "home_device_max_over_mean": _describe(home_ratios) if home_ratios else None,
        "home_std_over_std": float(np.median(std_ratios)) if std_ratios else None,
        "num_swaps": changes.count("swap"),
        "num_relayouts": changes.count("relayout"),
        "modelled_saving_msec": float(np.mean(savings_msec)) if savings_msec else None,
        "measured": _measure(msec, adopted, compiling),
    }


def _measure(
    msec: dict[int, float], adopted: set[int], compiling: set[int]
) -> dict | None:
    """Return what steps took before and after the first adoption, in the median, and
    what the later ones saved in all, waits and adoptions counted; None where too few
    came before it. Steps beside which a layout compiled are no measure."""
    if not adopted:
        return None
    early = sorted(step for step in msec if step < min(adopted))[2:]
    before = [msec[step] for step in early if step not in compiling]
    after = [msec[step] for step in msec if step >= min(adopted)]
    if len(before) < MIN_STEPS or not after:
        return None
    before_msec = float(np.median(before))
    return {
        "before_msec": before_msec,
        "after_msec": float(np.median(after)),
        "saved_sec": 1e-3 * (before_msec * len(after) - sum(after)),
        "of_sec": 1e-3 * before_msec * len(after),
    }


def _priced(msec: dict[int, float], modelled_msec: dict[int, float]) -> dict | None:
    """Return the median times of a step by the clock and by the cost model; None where
    no step has both."""
    steps = sorted(msec.keys() & modelled_msec.keys())
    if not steps:
        return None
    return {
        "step_msec": float(np.median([msec[step] for step in steps])),
        "modelled_msec": float(np.median([modelled_msec[step] for step in steps])),
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
        lines = [
            f"balancing       none ({settings}): {mean}, {ratio['max']:.2f} at most"
        ]
        if share := summary["dropped_share"]:
            lines.append(f"dropped         {share:.2%} of the choices of experts")
        return lines + _priced_lines(summary["priced"], speeds)
    swaps = count(summary["num_swaps"], "swap")
    relayouts = count(summary["num_relayouts"], "relayout")
    head = f"balancing       {summary['policy']}: {swaps}, {relayouts}; {mean}"
    home = summary["home_device_max_over_mean"]
    if home is None:
        return [head]
    top = max(*ratio["over_time"], *home["over_time"], 1.01)
    lines = [
        f"{head}, and {home['mean']:.2f} for the home placement of the same loads",
        f"device max/mean of the worst layer over time ('{RAMP}': 1 to {top:.2f})",
    ]
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
    if (measured := summary["measured"]) is not None:
        lines.append(_measured_line(measured, cfg))
    return lines + _priced_lines(summary["priced"], speeds)


def _priced_lines(priced: dict | None, speeds: str) -> list[str]:
    """Return the line that says how much of a step the cost model explains, where its
    speeds were measured."""
    if priced is None or not speeds.startswith("measured"):
        return []
    step_msec, modelled_msec = priced["step_msec"], priced["modelled_msec"]
    return [
        f"priced          {modelled_msec:.3g} of {step_msec:.3g} ms a step (medians); "
        "no term has embedding, head, optimizer, the filling of buffers and the host"
    ]


def _measured_line(measured: dict, cfg: Config) -> str:
    """Return the line about measured times of steps. Simulated devices compute one
    after the other, so that their steps do not wait for the fullest one."""
    saved_sec, of_sec = measured["saved_sec"], measured["of_sec"]
    verb = "saved" if saved_sec >= 0 else "lost"
    line = (
        f"measured        {abs(saved_sec):.3g} s {verb} of {of_sec:.3g} s, waits "
        f"counted: a step took {measured['before_msec']:.3g} ms before the first "
        f"change, and {measured['after_msec']:.3g} ms since"
    )
    if cfg.train.num_simulated_devices is not None and jax.local_device_count() > 1:
        line += " (simulated devices that share cores gain nothing from balance)"
    return line


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


def _numbers(values) -> list[float]:
    """Return the finite numbers of a list; none of anything else, which a damaged line
    may hold."""
    if not isinstance(values, list):
        return []
    return [
        float(x) for x in values if type(x) in (int, float) and abs(x) <= MAX_NUMBER
    ]
