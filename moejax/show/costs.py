"""Views of predicted times: prices of a cost model, parts of a step, terms of a
candidate, and the candidates that a choice compared."""

from moejax.choice import Choice
from moejax.perf.cost_model import CostModel, StepParts
from moejax.perf.terms import Prediction
from moejax.show.table import PALETTE, Cell, View, bar, head, left_out, quantity, tint

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
    rows = [(head("what"), head("size"), head("time"))]
    rows += [
        (head(name), Cell(sizes.get(size, "")), Cell(_seconds(sec)))
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
    rows = [(head("part"), head("time"), head("share"), head("content"))]
    for name, content in PARTS.items():
        sec = getattr(parts, name)
        share = sec / parts.total if parts.total else 0.0
        is_rounding = abs(share) < ROUNDING
        rows.append(
            (
                head(name),
                Cell(_seconds(0.0 if is_rounding else sec)),
                Cell(f"{share:.0%}", bar(share)),
                Cell(content),
            )
        )
    title = f"modelled time of a step: {_seconds(parts.total)}"
    return View(title, tuple(rows))


def prediction(prediction: Prediction) -> View:
    """Return a view of one candidate's terms: how often, how many bytes, how long."""
    terms = prediction.terms[:MAX_ROWS]
    rows = [tuple(map(head, ("term", "times", "bytes", "time", "share")))]
    for term in terms:
        share = term.sec / prediction.sec if prediction.sec else 0.0
        rows.append(
            (
                head(term.name),
                Cell(f"{term.count}"),
                Cell(quantity(term.bytes, BYTES) if term.bytes else ""),
                Cell(_seconds(term.sec)),
                Cell(f"{share:.0%}", bar(share)),
            )
        )
    notes = ["bytes are those that leave one device"]
    notes += left_out(len(prediction.terms) - len(terms), "terms")
    title = f"predicted time of a layer and micro-batch: {_seconds(prediction.sec)}"
    return View(title, tuple(rows), tuple(notes))


def choice(choice: Choice) -> View:
    """Return a view of a choice by predicted times: all candidates, fastest first; the
    one that is chosen has a color. Of other choices the view has the reason."""
    chosen, predictions = choice.value, choice.alternatives
    if not predictions or not all(
        isinstance(each, Prediction) for each in predictions.values()
    ):
        rows = [
            (head(str(each)), Cell(str(what))) for each, what in predictions.items()
        ]
        return View(f"chosen: {chosen}", tuple(rows), (choice.why,))
    ordered = sorted(
        predictions.items(), key=lambda pair: (pair[1].sec, pair[0] != chosen)
    )
    best_sec = predictions[chosen].sec
    rows = [tuple(map(head, ("candidate", "time", "over the best", "bytes")))]
    for name, predicted in ordered[:MAX_ROWS]:
        over = predicted.sec / best_sec if best_sec else 1.0
        color = tint(PALETTE[2], 0.35) if name == chosen else ""
        texts = (
            _seconds(predicted.sec),
            f"{over:.2f}",
            quantity(predicted.total_bytes(""), BYTES),
        )
        words = " x ".join(map(str, name)) if isinstance(name, tuple) else name
        rows.append((head(words, color=color), *(Cell(text, color) for text in texts)))
    notes = [choice.why, "times are of one layer and micro-batch, by the cost model"]
    notes += left_out(len(ordered) - MAX_ROWS, "candidates")
    return View(f"chosen: {rows[1][0].text}", tuple(rows), tuple(notes))


def _seconds(sec: float) -> str:
    """Return a time with its unit."""
    return quantity(1e9 * sec, SECONDS)
