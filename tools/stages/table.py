"""The stages of a bring-up, cheapest proof first."""

from tools.stages import (
    layer,
    numerics,
    programs,
    resume,
    sanitizer,
    speeds,
    steps,
    tuning,
)
from tools.stages.stage import Stage

TRAIN = ("flax", "optax", "orbax.checkpoint", "gin", "grain", "rich", "tensorstore")
"""Modules that training imports."""

STAGES = (
    Stage(
        "machine", "memory, products, collectives, JAX's own kernel", speeds.work,
        need_sec=60, limit_sec=180, needs=("jaxtyping",),
    ),
    Stage(
        "numerics", "every kernel against float64, twice", numerics.work,
        need_sec=180, limit_sec=600, needs=("jaxtyping",), needs_hopper=True,
    ),
    Stage(
        "sanitizer", "memcheck and racecheck of every kernel", sanitizer.work,
        need_sec=120, limit_sec=420, needs=("jaxtyping",), needs_hopper=True,
    ),
    Stage(
        "attention", "the forms of attention, time and error", programs.attention,
        need_sec=60, limit_sec=240, needs=("jaxtyping",),
    ),
    Stage(
        "tuning", "tiles for the configurations' products", tuning.work,
        need_sec=120, limit_sec=480, needs=("jaxtyping", "gin"), needs_hopper=True,
        after=("numerics",),
    ),
    Stage(
        "products", "grouped products against every peer", programs.products,
        need_sec=180, limit_sec=600, needs=("jaxtyping",),
    ),
    Stage(
        "layer", "one MoE layer, kernels against XLA", layer.work,
        need_sec=60, limit_sec=240, needs=("jaxtyping", "flax"),
    ),
    Stage(
        "steps", "30 steps of the largest model that fits", steps.steps,
        need_sec=150, limit_sec=480, needs=("jaxtyping", *TRAIN),
        after=("numerics", "sanitizer", "tuning"),
    ),
    Stage(
        "profile", "where the time of three steps goes", steps.profile,
        need_sec=60, limit_sec=240, needs=("jaxtyping", *TRAIN), after=("steps",),
    ),
    Stage(
        "variants", "remat, chunks, flags, fp8, one at a time", steps.variants,
        need_sec=150, limit_sec=600, needs=("jaxtyping", *TRAIN), after=("steps",),
    ),
    Stage(
        "resume", "save and restore, and every exchange", resume.work,
        need_sec=90, limit_sec=300, needs=("jaxtyping", *TRAIN),
    ),
)  # fmt: skip
BY_NAME = {stage.name: stage for stage in STAGES}
DRY_LIMIT_SEC = 240.0
"""Limit on each stage of a dry run, many times what it takes on an idle machine."""
PLANTED_LIMIT_SEC = 5.0
"""Limit on a stage whose hang is planted."""
