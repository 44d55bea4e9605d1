"""Options of XLA's compiler that a run sets for its steps on GPUs.

XLA starts and ends a collective where its scheduler puts these; what stands between
hides it. Each option here changes what `tools/aot.py` reads from a compiled schedule
(docs/overlap.md has the figures). A flag in the variable XLA_FLAGS goes first.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class GpuOption:
    """One option of XLA's compiler, which XLA_FLAGS knows as --name=value."""

    name: str
    value: Any
    why: str
    """Purpose of the option, in a few words."""


LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
GPU_OPTIONS = (
    GpuOption(
        LATENCY_HIDING,
        True,
        "collectives start early and end late",
    ),
    GpuOption(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        4,
        "a short gather does not keep a long exchange from its place",
    ),
)
"""Options of train and evaluation steps."""


def compiler_options(
    platform: str, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the options to compile a step with for devices of a platform ('gpu', 'cpu'
    or another), by name. Those that the user has set in XLA_FLAGS are not among
    them."""
    if platform != "gpu":
        return {}
    set_by_user = _flags(environ)
    return {o.name: o.value for o in GPU_OPTIONS if o.name not in set_by_user}


def options_line(platform: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the line in which a run says how its steps are compiled; None where it
    sets no option."""
    if platform != "gpu":
        return None
    set_by_user, parts = _flags(environ), []
    for option in GPU_OPTIONS:
        if option.name in set_by_user:
            parts.append(f"{option.name} as in XLA_FLAGS")
        else:
            parts.append(f"{option.name}={option.value} ({option.why})")
    return f"compiler options   {', '.join(parts)}"


def value_of(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """Return the value of one of GPU_OPTIONS with which steps on GPUs are compiled, as
    a text where XLA_FLAGS has it. A flag without a value is 'true'."""
    of_run = {option.name: option.value for option in GPU_OPTIONS}[name]
    return _flags(environ).get(name, of_run)


def _flags(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the flags in XLA_FLAGS by name; of one that is there twice, the last."""
    pairs = (word.partition("=") for word in environ.get("XLA_FLAGS", "").split())
    return {name.lstrip("-"): value or "true" for name, _, value in pairs}
