"""What a device's memory holds at the peak of a compiled step, by kind."""

import re
from typing import NamedTuple

from tools.compiled.buffers import Peak, Value, find_peak, new_bytes
from tools.compiled.compile import CompiledStep, plain_shape
from tools.compiled.hlo import read
from tools.compiled.origins import Origin, Origins

GIB = 2**30
KINDS = {
    "masters": "master parameters",
    "moments": "the optimizer's moments",
    "gradients": "gradients of weights, and their sums over micro-batches",
    "slots": "weights as layers compute with them: slots, gathered dense weights",
    "activations": "values that the forward pass keeps, and those of the layer at work",
    "exchange": "buffers of rows that are sent, received, or put in order for it",
    "temporaries": "everything else: the update, metrics, batches, gaps",
}
NUM_LARGEST = 20

MOMENTS = re.compile(r"^state\.opt_state\b.*\.(mu|nu)\b")
ARGUMENTS = {
    "state.params": "masters",
    "state.tracked": "slots",
}
"""Kinds of arguments, by the beginning of their names; all others are temporaries."""

SCOPES = {
    "optimizer": "temporaries",
    "gradients": "gradients",
    "scatter_gradients": "gradients",
    "experts": "activations",
    "dispatch": "exchange",
    "combine": "exchange",
    "manifest": "exchange",
    "slots": "slots",
    "domain": "slots",
    "compress": "slots",
    "gather_experts": "slots",
    "gathered": "slots",
}
"""Kinds by named scope. The first that a value's path has wins."""
MOVES = {"concatenate", "convert_element_type", "dynamic_slice", "reshape", "transpose"}
"""Primitives that make a weight in use from a master parameter."""
WORD = re.compile(r"[A-Za-z_]\w*")


class Buffer(NamedTuple):
    """A value in memory at the peak."""

    kind: str
    num_bytes: int
    type: str
    """Type and shape on one device, such as 'bf16[2,4096,2048]'."""
    source: str
    """The line of ours that made it, or '' where XLA names none."""
    what: str
    """Name of an argument, or the scopes and the primitive of the value."""


class Memory(NamedTuple):
    """A device's memory at the peak of a step."""

    peak_bytes: int
    bytes_by_kind: dict[str, int]
    """Their sum is the peak."""
    gap_bytes: int
    """Part of the temporaries that lies between buffers, where nothing fits."""
    host_bytes: int
    """Bytes in the host's memory, which the peak does not count."""
    buffers: tuple[Buffer, ...]
    """All buffers, the largest first."""

    @property
    def largest(self) -> tuple[Buffer, ...]:
        return self.buffers[:NUM_LARGEST]


def memory(step: CompiledStep) -> Memory:
    """Return the memory of a compiled step at its peak."""
    peak = find_peak(step.buffer_assignment, step.live_range)
    origins = Origins(read(step.dumped_text))
    buffers = [*_arguments(peak, origins), *_temporaries(peak, origins, step)]
    by_kind = dict.fromkeys(KINDS, 0)
    for buffer in buffers:
        by_kind[buffer.kind] += buffer.num_bytes
    # What is left are the gaps, constants and results that replace no argument.
    by_kind["temporaries"] += step.peak_bytes - sum(by_kind.values())
    return Memory(
        step.peak_bytes,
        by_kind,
        peak.gap_bytes,
        peak.host_bytes,
        tuple(sorted(buffers, key=lambda buffer: -buffer.num_bytes)),
    )


def _arguments(peak: Peak, origins: Origins) -> list[Buffer]:
    """Return a buffer for each argument; it lives as long as the step."""
    names = origins.arguments()
    buffers = []
    for allocation in peak.arguments:
        name = names.get(allocation.parameter, "")
        types = [value.type for value in allocation.values] or [""]
        buffers.append(
            Buffer(kind_of_argument(name), allocation.num_bytes, types[0], "", name)
        )
    return buffers


def kind_of_argument(name: str) -> str:
    """Return the kind of an argument of the train step, by its name."""
    if MOMENTS.match(name):
        return "moments"
    kinds = (kind for begin, kind in ARGUMENTS.items() if name.startswith(begin))
    return next(kinds, "temporaries")


def _temporaries(peak: Peak, origins: Origins, step: CompiledStep) -> list[Buffer]:
    """Return a buffer for each place that is taken at the peak."""
    buffers = []
    for place, size in zip(peak.live, new_bytes(peak.live)):
        candidates = [_buffer(value, size, origins, step) for value in place]
        named = [b for b in candidates if b.kind != "temporaries"]
        buffers.append((named or candidates)[0])
    return buffers


def _buffer(value: Value, size: int, origins: Origins, step: CompiledStep) -> Buffer:
    origin = origins.of(value.name, value.index)
    is_weight = plain_shape(value.shape) in step.weight_shapes
    kind = kind_of_value(origin, is_weight=is_weight)
    what = short(origin) or f"instruction {value.name}"
    return Buffer(kind, size, value.type, origin.source, what)


def kind_of_value(origin: Origin, *, is_weight: bool) -> str:
    """Return the kind of a value that the step computes.

    `is_weight` says that it has the shape of a weight or a part of one. Such a value is
    a gradient if the backward pass makes it, and a weight in use if the forward pass
    only moves or converts it. In the backward pass, what is computed again belongs to
    the forward pass.
    """
    path = origin.op_name
    is_loss = "jvp(" in path
    is_backward = "transpose(" in path and "rematted_computation" not in path
    words = set(WORD.findall(path))
    scoped = next((kind for scope, kind in SCOPES.items() if scope in words), None)
    if scoped in ("slots", "gradients"):
        return "gradients" if is_backward else scoped
    if is_weight and scoped != "temporaries" and path:
        if is_backward or not is_loss:
            return "gradients"
        if path.rpartition("/")[2] in MOVES:
            return "slots"
    if scoped is not None:
        return scoped
    return "activations" if is_loss else "temporaries"


def short(origin: Origin) -> str:
    """Return the scopes and the primitive of a value, without the names of JAX's own
    transformations."""
    skipped = ("while", "body", "eval_jaxpr", "shard_map", "checkpoint", "closed_call")
    path = origin.stacked or origin.op_name
    path = path.replace("/(", "/").partition(":")[0]  # one of several that XLA joined
    parts = [part for part in path.split("/")[1:] if part not in skipped]
    return ("all layers of " if origin.stacked else "") + "/".join(parts)
