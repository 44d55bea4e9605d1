"""Answers of what_if as text and as a record."""

import dataclasses

from moejax.config import Config
from moejax.model.flops import num_params
from moejax.resolve.step_time import StepTime
from tools.simulated.what_if import Answer, Answers

GIB = 2**30
NUM_REFUSED = 4
"""Number of refusals that are printed."""


def record(answers: Answers, cfg: Config, tokens: float) -> dict:
    """Return the answers as plain data, the fastest first. `tokens` are those of the
    training whose device hours are counted."""
    return {
        "cluster": str(answers.cluster),
        "num_devices": answers.cluster.num_devices,
        "load": answers.load,
        "tokens": tokens,
        "answers": [_row(answer, cfg, answers, tokens) for answer in answers.found],
        "refused": answers.refused,
    }


def _row(answer: Answer, cfg: Config, answers: Answers, tokens: float) -> dict:
    dispatch = answer.cfg.dispatch
    sec = answer.time.total
    return {
        "mesh": dataclasses.asdict(answer.cfg.mesh),
        "group": dispatch.group,
        "schedule": dispatch.schedule,
        "domain": dispatch.domain,
        "method": str(answer.method),
        "sec": sec,
        "parts": dataclasses.asdict(answer.time),
        "tok_per_sec": answer.tok_per_sec,
        "mfu": answer.mfu,
        "total_bytes": answer.total_bytes,
        "device_hours": device_hours(answer, answers.cluster.num_devices, tokens),
        "gin_params": gin_lines(cfg, answer.cfg),
    }


def device_hours(answer: Answer, num_devices: int, tokens: float) -> float:
    """Return the hours of all devices together in which a number of tokens is
    trained."""
    return num_devices * tokens / answer.tok_per_sec / 3600


def gin_lines(before: Config, after: Config) -> list[str]:
    """Return the gin bindings that lead from one configuration to another."""
    return [
        f"{part.name.title()}.{field.name} = {value!r}"
        for part in dataclasses.fields(after)
        for field in dataclasses.fields(getattr(after, part.name))
        if (value := getattr(getattr(after, part.name), field.name))
        != getattr(getattr(before, part.name), field.name)
    ]


def lines(answers: Answers, cfg: Config, tokens: float, count: int) -> list[str]:
    """Return the lines that say the `count` fastest answers to a reader: a table, why
    each of the others is slower, and the gin bindings of the first."""
    found, cluster = answers.found[:count], answers.cluster
    params = num_params(cfg.network)
    best = found[0]
    head = (
        f"{cluster}, {cluster.num_devices} devices; {_count(params['total'])} "
        f"parameters, {_count(params['active'])} per token; loads {answers.load}"
    )
    table = [
        f"{'':3}{'mesh (dc, data, expert, tensor)':34}{'s/step':>8}"
        f"{'if rows hide':>14}{'tokens/s':>12}{'MFU':>7}{'GiB':>7}"
        f"{'device h':>12}  how",
        *(_line(n, x, cluster.num_devices, tokens) for n, x in enumerate(found, 1)),
        f"device h: device hours for {tokens:.3g} tokens. Seconds are predicted at the "
        "stated rates; 'if rows hide'",
        "is a step in which other work hides the whole exchange of rows (Moe.halves).",
    ]
    slower = [f"{'':3}seconds of the first: {_parts(best.time)}"]
    slower += [f"{n:<3}{_why(x, best)}" for n, x in enumerate(found[1:], 2)]
    others = len(answers.found) - len(found)
    more = [f"{others} more are slower"] * (others > 0)
    refused = list(answers.refused.items())
    more += [f"cannot run: {name}: {why}" for name, why in refused[:NUM_REFUSED]]
    if len(refused) > NUM_REFUSED:
        more.append(f"and {len(refused) - NUM_REFUSED} others (--json has them)")
    bindings = gin_lines(cfg, best.cfg) or ["# as configured"]
    return [
        head, *table, "", "why the others take longer for a token", *slower, *more, "",
        "the first, as lines of a gin file", *(f"    {line}" for line in bindings),
    ]  # fmt: skip


def _count(number: int) -> str:
    """Return a number of parameters in words."""
    size, word = (1e9, "billion") if number >= 1e9 else (1e6, "million")
    return f"{number / size:.3g} {word}"


def _line(number: int, answer: Answer, num_devices: int, tokens: float) -> str:
    """Return the line of an answer in the table."""
    mfu = "" if answer.mfu is None else f"{answer.mfu:.1%}"
    mesh = " x ".join(map(str, answer.cfg.mesh.sizes))
    return (
        f"{number:<3}{mesh:34}{answer.time.total:8.3g}"
        f"{answer.time.total - answer.time.exchange:14.3g}{answer.tok_per_sec:12,.0f}"
        f"{mfu:>7}{answer.total_bytes / GIB:7.1f}"
        f"{device_hours(answer, num_devices, tokens):12,.0f}  {how(answer)}"
    )


def how(answer: Answer) -> str:
    """Return in words how an answer communicates and balances."""
    dispatch, words = answer.cfg.dispatch, []
    if dispatch.group != "expert":
        words.append(f"group {dispatch.group}")
    if dispatch.schedule != "auto" and answer.cfg.mesh.tensor > 1:
        words.append(dispatch.schedule)
    if dispatch.domain is not None:
        words.append(f"domain {dispatch.domain[0]} x {dispatch.domain[1]}")
    if answer.cfg.mesh.expert == 1 and dispatch.group == "expert":
        words.append("every device computes all experts")
    if str(answer.method) != "home in store owned":
        words.append(str(answer.method))
    if dispatch.slots_per_device is not None:
        words.append(f"{dispatch.slots_per_device} slots")
    return ", ".join(words) or "home"


def _parts(time: StepTime) -> str:
    """Return the parts of a time that are not 0, in words."""
    parts = dataclasses.asdict(time).items()
    least = 1e-3 * time.total
    return ", ".join(f"{name} {sec:.3g}" for name, sec in parts if sec >= least)


def _why(answer: Answer, best: Answer) -> str:
    """Return what makes an answer slower than the best one for the same tokens: the
    parts in which it takes longer, and those in which it saves."""
    scale = best.sec_per_token / best.time.total
    scale = answer.sec_per_token / answer.time.total / scale
    here, there = (dataclasses.asdict(x.time) for x in (answer, best))
    more = {name: scale * here[name] - there[name] for name in here}
    slower = answer.sec_per_token / best.sec_per_token - 1
    least = 0.02 * slower * best.time.total
    order = sorted(more.items(), key=lambda item: -abs(item[1]))
    shown = ", ".join(f"{name} {sec:+.3g}" for name, sec in order if abs(sec) > least)
    return f"{slower:+.1%}: {shown or 'no part'}"
