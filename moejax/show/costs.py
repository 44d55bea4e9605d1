"""Views of predicted times: prices of a cost model, parts of a step, terms of a
candidate, and the candidates that a choice compared."""

from moejax.choice import Choice
from moejax.perf.cost_model import CostModel
from moejax.perf.layer_times import StepParts
from moejax.perf.terms import Prediction
from moejax.show.table import View, left_out, quantity

SECONDS = ("ns", "us", "ms", "s")
BYTES = ("B", "kB", "MB", "GB", "TB")
FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
MAX_ROWS = 24
"""Largest number of candidates or terms that a view lists."""
ROUNDING = 1e-9
"""Share of a step below which a part is a rounding error of the others."""
PARTS = {
    "experts": "experts, if every device had the mean number of rows",
    "wait": "waiting for the fullest device",
    "wires": "exchanges of rows",
    "copies": "weights to slots, gradients back, as far as nothing hides them",
    "blocks": "the rest of the blocks",
}


def cost_model(cost: CostModel) -> View:
    """Return a view of a cost model's prices: what one row, expert, move, collective
    and compilation takes."""
    wire, flops = cost.bytes_per_sec, cost.flops_per_sec
    prices = [
        ("compute a row, forward", cost.flops_per_row / flops, "FLOPs per row"),
        ("send a row to another device", cost.bytes_per_row / wire, "row"),
        ("send the weights of an expert", cost.bytes_per_expert / wire, "weights"),
        ("move an expert to a new owner", cost.bytes_per_move / wire, "master"),
        ("begin a collective", cost.latency_sec, ""),
        ("gather a slot over data", cost.gather_sec, ""),
        ("rest of a block, forward", cost.other_sec, ""),
        ("wait at a loop of rounds", cost.loop_sec, ""),
        ("compile a step", cost.compile_sec, ""),
    ]
    sizes = {
        "FLOPs per row": quantity(cost.flops_per_row, FLOPS),
        "row": quantity(cost.bytes_per_row, BYTES),
        "weights": quantity(cost.bytes_per_expert, BYTES),
        "master": quantity(cost.bytes_per_move, BYTES),
    }
    rows = [("what", "size", "time")]
    rows += [
        (name, sizes.get(size, ""), _seconds(sec))
        for name, sec, size in prices
        if sec > 0
    ]
    title = (
        f"cost model: a device computes {quantity(flops, FLOPS)}/s and sends "
        f"{quantity(wire, BYTES)}/s, micro-batches: {cost.micro_batches}"
    )
    free = [name for name, sec, _ in prices if not sec > 0]
    notes = [f"free: {', '.join(free)}"] if free else []
    return View(title, tuple(rows), tuple(notes))


def step_parts(parts: StepParts) -> View:
    """Return a view of the modelled time of a step by parts, with their shares."""
    rows = [("part", "time", "share", "content")]
    for name, content in PARTS.items():
        sec = getattr(parts, name)
        share = sec / parts.total if parts.total else 0.0
        is_rounding = abs(share) < ROUNDING
        rows.append(
            (
                name,
                _seconds(0.0 if is_rounding else sec),
                f"{share:.0%}",
                content,
            )
        )
    title = f"modelled time of a step: {_seconds(parts.total)}"
    return View(title, tuple(rows))


def prediction(prediction: Prediction) -> View:
    """Return a view of one candidate's terms: how often, how many bytes, how long."""
    terms = prediction.terms[:MAX_ROWS]
    rows = [("term", "times", "bytes", "time", "share")]
    for term in terms:
        share = term.sec / prediction.sec if prediction.sec else 0.0
        rows.append(
            (
                term.name,
                f"{term.count}",
                quantity(term.bytes, BYTES) if term.bytes else "",
                _seconds(term.sec),
                f"{share:.0%}",
            )
        )
    notes = ["bytes are those that leave one device"]
    notes += left_out(len(prediction.terms) - len(terms), "terms")
    title = f"predicted time of a layer and micro-batch: {_seconds(prediction.sec)}"
    return View(title, tuple(rows), tuple(notes))


def choice(choice: Choice) -> View:
    """Return a view of a choice: the reason, and what was compared. Candidates with
    predicted times stand fastest first."""
    title, alternatives = f"chosen: {_name(choice.value)}", choice.alternatives
    are_predicted = all(isinstance(x, Prediction) for x in alternatives.values())
    if not alternatives or not are_predicted:
        rows = [(_name(name), str(what)) for name, what in alternatives.items()]
        return View(title, (("alternative", ""), *rows), (choice.why,))
    ordered = sorted(
        alternatives.items(), key=lambda pair: (pair[1].sec, pair[0] != choice.value)
    )
    best_sec = alternatives[choice.value].sec
    rows = [("candidate", "time", "over the best", "bytes")]
    for name, predicted in ordered[:MAX_ROWS]:
        over = predicted.sec / best_sec if best_sec else 1.0
        sent = quantity(predicted.total_bytes(""), BYTES)
        rows.append((_name(name), _seconds(predicted.sec), f"{over:.2f}", sent))
    notes = [choice.why, "times are of one layer and micro-batch, by the cost model"]
    notes += left_out(len(ordered) - MAX_ROWS, "candidates")
    return View(title, tuple(rows), tuple(notes))


def _name(value) -> str:
    """Return a candidate in words: '1 x 4' for the domain (1, 4)."""
    is_sizes = isinstance(value, tuple) and all(isinstance(x, int) for x in value)
    return " x ".join(map(str, value)) if is_sizes else str(value)


def _seconds(sec: float) -> str:
    """Return a time with its unit."""
    return quantity(1e9 * sec, SECONDS)
