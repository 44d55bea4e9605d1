"""Estimate the FLOPs, bytes and seconds of instructions."""

import dataclasses
import math
import re
from typing import NamedTuple

from moejax.perf.rates import Rates
from tools.compiled.hlo import Array, Computation, Instruction, Module


class Work(NamedTuple):
    """FLOPs and bytes of one run of an instruction."""

    dense_flops: float = 0.0
    grouped_flops: float = 0.0
    """FLOPs of experts' products, of all rows of their buffers."""
    attention_flops: float = 0.0
    num_bytes: float = 0.0
    """Bytes read and written in HBM."""

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(sum, zip(self, other, strict=True)))

    def times(self, count: float) -> "Work":
        """Return the work of `count` runs."""
        return Work(*(count * value for value in self))

    def seconds(self, rates: Rates) -> float:
        """Return the longer of the seconds of its FLOPs and of its bytes."""
        return max(
            (self.dense_flops + self.attention_flops) / rates.dense_flops_per_sec
            + self.grouped_flops * rates.filled_rows / rates.grouped_flops_per_sec,
            self.num_bytes / rates.hbm_bytes_per_sec,
        )


@dataclasses.dataclass(frozen=True)
class Estimator:
    """Estimates instructions of one module, and remembers what fusions contain."""

    module: Module
    _flops: dict[str, Work] = dataclasses.field(default_factory=dict)

    def work(self, computation: Computation, instruction: Instruction) -> Work:
        """Return the work of one run of an instruction that is no loop, conditional,
        call or collective. An asynchronous instruction has its work at its start."""
        opcode = instruction.opcode
        if opcode in _FREE or opcode.endswith(("-done", "-update")):
            return Work()
        operands = [computation.instructions[name] for name in instruction.operands]
        opcode = opcode.removesuffix("-start")
        if opcode in ("fusion", "async", "call"):
            called = self.module.callees(instruction)[0]
            return self._flops_of(called)._replace(
                num_bytes=fusion_bytes(called, operands)
            )
        flops = product_flops(instruction, operands)
        num_bytes = _num_bytes(opcode, instruction, operands)
        return flops._replace(num_bytes=num_bytes)

    def _flops_of(self, computation: Computation) -> Work:
        """Return the FLOPs of all products in a fused computation."""
        total = self._flops.get(computation.name)
        if total is None:
            total = Work()
            for instruction in computation:
                if instruction.opcode == "fusion":
                    for called in self.module.callees(instruction, "calls"):
                        total += self._flops_of(called)
                elif instruction.opcode in ("dot", "custom-call"):
                    names = instruction.operands
                    operands = [computation.instructions[name] for name in names]
                    total += product_flops(instruction, operands)
            self._flops[computation.name] = total
        return total


def product_flops(instruction: Instruction, operands: list[Instruction]) -> Work:
    """Return the FLOPs of a product, and no work for other instructions.

    A multiply-add is two FLOPs. Read are: `dot`; products of cuBLAS; our grouped
    kernels, by their names in op_name; and attention of cuDNN. Causal attention needs
    half of the scores of a window. Documents and windows need less, but where they
    begin is not in a program: each row counts as one document.
    """
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "dot":
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        return Work(dense_flops=_dot_flops(instruction, operands, dims and dims[1]))
    if opcode != "custom-call":
        return Work()
    target = _target(instruction)
    if target.startswith("__cublas$"):
        dims = re.search(
            r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.config
        )
        return Work(dense_flops=_dot_flops(instruction, operands, dims and dims[1]))
    if target.startswith(CUDNN_CALL):
        return Work(attention_flops=_attention_flops(instruction, operands))
    if target.startswith("mosaic_gpu"):
        return Work(grouped_flops=_grouped_flops(instruction, operands))
    return Work()


def attention_kernel(instruction: Instruction) -> str | None:
    """Return the target of a call of cuDNN's attention; None for other
    instructions."""
    if instruction.opcode.removesuffix("-start") != "custom-call":
        return None
    target = _target(instruction)
    return target if target.startswith(CUDNN_CALL) else None


def fusion_bytes(computation: Computation, operands: list[Instruction]) -> float:
    """Return the bytes that a fusion reads and writes.

    Of an operand of which it only reads slices, the slices count; of a result that is
    an operand with a slice replaced, the slice counts.
    """
    users: dict[str, list[Instruction]] = {}
    for instruction in computation:
        for name in instruction.operands:
            users.setdefault(name, []).append(instruction)
    total = 0.0
    for instruction in computation:
        if instruction.parameter is not None:
            whole = operands[instruction.parameter].num_bytes
            total += min(whole, _bytes_read(computation, instruction, users))
    root = computation.root
    outputs = root.operands if root.opcode == "tuple" else (root.name,)
    return total + sum(
        _bytes_written(computation, computation.instructions[name]) for name in outputs
    )


def _bytes_read(
    computation: Computation, value: Instruction, users: dict[str, list[Instruction]]
) -> float:
    """Return the bytes of `value` that its users in a fusion read."""
    total = 0.0
    for user in users.get(value.name, ()):
        if user.opcode == "bitcast":
            total += _bytes_read(computation, user, users)
        elif user.opcode in _SLICES and user.operands[0] == value.name:
            total += user.num_bytes
        elif user.opcode == _UPDATE and user.operands[0] == value.name:
            pass  # what is replaced is not read
        elif user.opcode != "tuple":
            return value.num_bytes
    return total


def _bytes_written(computation: Computation, value: Instruction) -> float:
    """Return the bytes that a fusion writes for one of its results."""
    while value.opcode == "bitcast":
        value = computation.instructions[value.operands[0]]
    if value.opcode == _UPDATE:
        return computation.instructions[value.operands[1]].num_bytes
    return 0.0 if value.parameter is not None else value.num_bytes


def _num_bytes(
    opcode: str, instruction: Instruction, operands: list[Instruction]
) -> float:
    """Return the bytes that an instruction reads and writes outside a fusion. `opcode`
    is without '-start', at which the results have the operands before them."""
    if opcode in _SLICES:
        is_start = opcode != instruction.opcode
        return 2 * instruction.results[len(operands) if is_start else 0].num_bytes
    if opcode == _UPDATE:
        return 2 * operands[1].num_bytes
    return instruction.num_bytes + sum(operand.num_bytes for operand in operands)


def _dot_flops(
    instruction: Instruction, operands: list[Instruction], contracted: str | None
) -> float:
    """Return the FLOPs of a product whose left operand has these contracted dims."""
    (left,) = operands[0].results
    dims = [int(n) for n in re.findall(r"\d+", contracted or "")]
    return 2.0 * instruction.results[0].size * math.prod(left.dims[d] for d in dims)


def _grouped_flops(instruction: Instruction, operands: list[Instruction]) -> float:
    """Return the FLOPs of a grouped kernel, if all rows of its buffer are computed; 0
    for a kernel that is no product.

    Its first operands are tables of integers. `grouped_rows` takes rows [m, k] and a
    matrix per group [g, k, n] or its transpose, and `grouped_matrices` takes rows
    [m, k] and [m, n].
    """
    arrays = [array for operand in operands for array in operand.results]
    floats = [a for a in arrays if a.dtype.startswith(("f", "bf"))]
    if "grouped_rows" in instruction.op_name:
        return 2.0 * floats[0].dims[0] * math.prod(floats[1].dims[1:])
    if "grouped_matrices" in instruction.op_name:
        rows, depth = floats[0].dims
        return 2.0 * rows * depth * math.prod(floats[1].dims[1:])
    return 0.0


def _attention_flops(instruction: Instruction, operands: list[Instruction]) -> float:
    """Return the FLOPs of one call of cuDNN's attention, packed or not.

    Forward are two products of [b, n, t, s, h], backward five: scores are computed
    again. A causal mask needs (t + 1) / 2 of t positions. A packed call has the same
    shapes for all documents of a row together.
    """
    shape = re.search(
        r'"intermediate_tensor_shape":.*?"dimensions": ?\[([^\]]*)\]',
        instruction.config,
    )
    scores = Array("f32", tuple(int(n) for n in re.findall(r"\d+", shape[1])))
    depth = operands[0].results[0].dims[-1]
    num_products = 5 if "Backward" in _target(instruction) else 2
    length = scores.dims[-1]
    is_causal = re.search(r'"mask_type": ?"\w*CAUSAL', instruction.config)
    share = (length + 1) / (2 * length) if is_causal else 1.0
    return 2.0 * num_products * scores.size * depth * share


def _target(instruction: Instruction) -> str:
    match = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
    return match[1] if match else ""


CUDNN_CALL = "__cudnn$fmha"
"""Begin of the targets of XLA's calls of cuDNN's attention."""
_UPDATE = "dynamic-update-slice"
_SLICES = ("dynamic-slice", "slice", "gather")
_FREE = (
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "add-dependency",
    "copy-start",
)
"""Opcodes without work of the device's cores. `copy-start` is a copy by the DMA engine,
beside all others."""
