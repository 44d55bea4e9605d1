"""Checks of the kernels that a run's layers use: cases of moejax.kernels.cases with the
run's sizes.

Dtype, widths, heads and rules are those of the run. Numbers of rows and groups, and
widths above MAX_WIDTHS, are smaller, so that definitions in float64 take seconds.
"""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.kernels.cases import (
    GPU_ONLY,
    MOVES,
    Case,
    attention_case,
    move_case,
    product_case,
    water_fill_case,
)
from moejax.kernels.shapes import ProductShape
from moejax.kernels.tuning import layer_products
from moejax.plan.edge_coloring import max_colors
from moejax.resolve.kernels import attention_arrays, attention_rules, product_widths
from moejax.resolve.resolved import Resolved
from train.doctor.outcome import Outcome
from train.step.gpu_options import compiler_options

SIZES = (65, 0, 1, 7)
"""Numbers of rows of groups: more than a tile of 64, none, one, less than 8."""
MAX_WIDTHS = 2048, 1024
"""Largest width of a row, and hidden width of an expert, of products."""
NUM_TOKENS = 37
"""Number of tokens whose rows are permuted."""
DOCUMENTS = (63, 1, 20, 65, 7, 100)
"""Lengths of the documents in which attention is computed."""
MAX_WINDOW = 50
"""Largest window of keys of sliding layers; some documents are longer."""
MAX_KEY_HEADS = 4
"""Largest number of key heads; each serves as many query heads as in the run."""


@dataclasses.dataclass(frozen=True)
class KernelCheck:
    """One case of a kernel, in the implementation that the run uses."""

    case: Case
    implementation: str

    @property
    def name(self) -> str:
        """Return what is checked, with its sizes."""
        return f"{self.case.kernel} ({self.implementation}, {self.case.name})"

    @property
    def avoided_by(self) -> str:
        """Return the binding with which a run uses another implementation, as in
        Outcome."""
        if self.implementation not in GPU_ONLY:
            return ""
        if self.case.kernel == "attention":
            return "Model.attention = 'blocked'"
        return "Dispatch.kernels = 'plain'"


def kernel_checks(run: Resolved) -> list[KernelCheck]:
    """Return a check for each kernel that the layers of a run use."""
    cfg, layout = run.cfg, run.layout.exchanged.topped_up
    checks = _attention_checks(run)
    if cfg.router.training == "dense":
        return checks
    num_choices = 1 if cfg.router.gate_input else cfg.moe.top_k
    sizes = cfg.model.compute_dtype, NUM_TOKENS, num_choices, cfg.model.d_model
    permute = run.kernels["permute"].value
    moves = [move_case(move, *sizes) for move in MOVES]
    moves.append(move_case("weighted_sum", *sizes, has_gates=False))
    checks += [KernelCheck(move, permute) for move in moves]
    filling = run.kernels.get("water_fill")
    if filling is not None and filling.value == "hopper":
        colors = max_colors(layout.num_experts, layout.num_slots)
        case = water_fill_case(colors, layout.num_devices)
        checks.append(KernelCheck(case, "hopper"))
    return _product_checks(run) + checks


def _product_checks(run: Resolved) -> list[KernelCheck]:
    """Return a check for each product of a layer, forward and backward."""
    layout, dtype = run.layout, run.cfg.model.compute_dtype
    align, is_fp8 = layout.align_rows, layout.fp8 != "none"
    sizes = SIZES[: layout.exchanged.topped_up.slots_per_device]
    rows_g = tuple(-(-size // align) * align for size in sizes)
    d, f = map(min, product_widths(run.cfg, layout), MAX_WIDTHS)
    shape = ProductShape(sum(rows_g), d, f, len(rows_g))
    # Without fusion, a layer has the products of one in fp8, in its own dtype.
    is_unfused = is_fp8 or run.cfg.moe.why_unfused is not None
    options = {"align_rows": align, "num_blocks": None, "fp8": layout.fp8}
    checks = []
    for which, side in layer_products(shape, is_fp8=is_unfused):
        name = which if is_fp8 else which.removeprefix("fp8_")
        case = product_case(name, dtype, side.d, side.f, rows_g, **options)
        checks.append(KernelCheck(case, run.kernels["grouped_dot"].value))
    return checks


def _attention_checks(run: Resolved) -> list[KernelCheck]:
    """Return a check of attention, with its gradients, for each rule that the run's
    layers have; chunks are documents to it."""
    q_bthi, k_bugi, v_bugj = attention_arrays(run.cfg)[:3]
    (h, width), g = q_bthi.shape[2:], k_bugi.shape[2]
    num_keys = min(g, MAX_KEY_HEADS)
    heads, checks = (h // g * num_keys, num_keys), []
    for kind, rule in attention_rules(run.cfg).items():
        choice = run.kernels["attention"]
        if kind == "sliding":
            choice = run.kernels.get("attention in sliding layers", choice)
        window = rule.window and min(rule.window, MAX_WINDOW)
        case = attention_case(
            *(q_bthi.dtype.name, DOCUMENTS, heads, width),
            rule._replace(window=window),
            value_width=v_bugj.shape[3],
            num_sinks=heads[0] if run.cfg.attention.sinks else 0,
        )
        checks.append(KernelCheck(case, choice.value))
    return checks


def run_kernel(check: KernelCheck, devices: list[jax.Device]) -> Outcome:
    """Run a check on each of these devices of this process, and return what it found.
    Raises what the kernel or its compiler raises."""
    case, arguments = check.case, check.case.draw()
    mesh = Mesh(np.array(devices), ("device",))

    def body(*arguments):
        arguments = (
            jax.lax.pcast(array, "device", to="varying") for array in arguments
        )
        results = case.call(check.implementation, False)(*arguments)
        return jax.tree.map(lambda array: array[None], results)

    program = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("device")),
        compiler_options=compiler_options(devices[0].platform),
    )
    arguments_here = jax.device_put(arguments, NamedSharding(mesh, P()))
    results, errors = jax.device_get(program(*arguments_here)), {}
    expected = case.expected(arguments)
    for i, device in enumerate(devices):
        own = jax.tree.map(lambda array, i=i: array[i], results)
        errors[device.id] = case.error(own, expected)
    return Outcome(
        name=check.name,
        avoided_by=check.avoided_by,
        error=max(errors.values()),
        allowed=case.tolerance,
        devices=tuple(n for n, error in errors.items() if error > case.tolerance),
        process=jax.process_index(),
    )
