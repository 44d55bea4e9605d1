"""Short texts of compiled programs, in the form that XLA prints."""

import dataclasses

from moejax.perf.rates import Rates
from moejax.perf.target import load
from tools.compiled import hlo

HEAD = "HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[]}"


def read_program(entry: str, *computations: str) -> hlo.Module:
    """Return the module of an entry computation and others, given by their lines.

    The first line of each other computation is its name. A line that starts with 'ROOT'
    is the computation's result.
    """
    blocks = [_block(*text.strip().split("\n", 1)) for text in computations]
    return hlo.read("\n\n".join([HEAD, *blocks, _block("ENTRY main", entry)]))


def _block(name: str, lines: str) -> str:
    is_entry = name.startswith("ENTRY ")
    title = f"{'ENTRY ' * is_entry}%{name.removeprefix('ENTRY ')}"
    body = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    return f"{title} (p: f32[]) -> f32[] {{\n{body}\n}}"


def rates(**speeds: float) -> Rates:
    """Return rates of an H100, but for those given."""
    return dataclasses.replace(load("h100").rates, **speeds)
