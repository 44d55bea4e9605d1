"""Count the collectives of a train step, so that an accidental all-gather is seen.

    python -m tests.support.census    counts those of configs/tiny_cpu.gin, as JSON

cpu   the compiled step. `ours` are those in a shard_map, which are written by hand;
      `partitioner` are those that XLA inserted for parameters and losses.
cuda  the step lowered for CUDA, which needs no GPU. Only ours are counted, because the
      partitioner has not run yet: once with each transport.

Instructions are counted: one in the body of a loop (all layers, later rounds) counts
once.
"""

import collections
import dataclasses
import json
import re

from moejax.config import Config

HLO = re.compile(
    r"= .*? (all-to-all|ragged-all-to-all|all-gather|all-reduce|reduce-scatter|"
    r"collective-permute)(?:-start)?\("
)
STABLEHLO = re.compile(
    r"(?:stablehlo\.|@)(all_to_all|ragged_all_to_all|all_gather|all_reduce|"
    r"reduce_scatter|collective_permute)\b"
)
OURS = re.compile(r'op_name="[^"]*shard_map')


def census(cfg: Config) -> dict:
    """Return the number of collectives by backend, group and kind. The devices of cfg's
    mesh must be simulated in this process."""
    padded, ragged = (trace_step(cfg, transport) for transport in ("padded", "ragged"))
    return {
        "cpu": compiled_census(padded.lower().compile().as_text()),
        "cuda": {
            "ours_padded": lowered_census(padded),
            "ours_ragged": lowered_census(ragged),
        },
    }


def trace_step(cfg: Config, transport: str):
    """Return the traced train step of cfg with this transport."""
    from moejax.axes import make_mesh
    from moejax.resolve.resolved import resolve
    from train.step.compiled import make_model, trace_train_step

    dispatch = dataclasses.replace(cfg.dispatch, transport=transport)
    cfg = dataclasses.replace(cfg, dispatch=dispatch)
    return trace_train_step(make_model(resolve(cfg, make_mesh(cfg.mesh))))


def compiled_census(text: str) -> dict[str, dict[str, int]]:
    """Return the number of collectives in the text of a compiled program, by group and
    kind."""
    groups = {"ours": collections.Counter(), "partitioner": collections.Counter()}
    for line in text.splitlines():
        match = HLO.search(line)
        if match:
            group = "ours" if OURS.search(line) else "partitioner"
            groups[group][match.group(1)] += 1
    return {name: dict(sorted(counts.items())) for name, counts in groups.items()}


def lowered_census(traced) -> dict[str, int]:
    """Return the number of collectives of a traced step lowered for CUDA, by kind."""
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return dict(sorted(collections.Counter(STABLEHLO.findall(text)).items()))


if __name__ == "__main__":
    from train.config import gin_reader
    from train.launch.program import set_up_backend

    tiny = gin_reader.load(["configs/tiny_cpu.gin"])
    set_up_backend(tiny)
    print(json.dumps(census(tiny), indent=1))
