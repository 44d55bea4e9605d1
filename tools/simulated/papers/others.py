"""Systems that are named beside the five: what of each runs here, what a price says."""

import dataclasses
import pathlib
from typing import NamedTuple

from moejax.config import Config
from moejax.model.flops import flops_per_token
from moejax.perf import cluster as clusters
from moejax.plan.layout import Topology
from moejax.resolve.step_time import StepTime, predict
from tools.simulated.papers.models import configuration, resolved
from train.config import gin_reader

QWEN = pathlib.Path(__file__).resolve().parents[3] / "configs/qwen3_30b_a3b.gin"
CLUSTER = "h100_2x8"


class System(NamedTuple):
    """One system of the literature."""

    name: str
    runs: str
    """What of it runs here."""
    price: str
    """What our price says of it, by its published formula."""
    absent: str
    """What has no meaning here, or is not built."""


def systems() -> list[System]:
    cfg = gin_reader.load([str(QWEN)], [])
    step = _step(cfg)
    total, exchange = step.total, step.exchange
    hidden = total / (total - exchange)
    compressed = total / (total - exchange * (1 - 1 / 20))
    dense = flops_per_token(cfg.network)
    experts = cfg.moe.num_experts / cfg.moe.top_k
    dense_step = step.experts * experts + step.blocks + step.head + step.weights
    return [
        System(
            "SWARM (2301.11913)",
            "nothing: members come and go",
            f"its square-cube law: doubling widths, {_square_cube():.2f} times as much "
            "work for each byte that crosses a link",
            "one SPMD program has fixed members",
        ),
        System(
            "ATOM (2403.10504)",
            "`Model.remat = 'offload'`; `Train.accumulate_steps`",
            "without experts across data centres their link carries gradients alone: "
            "part `dc` of `what_if`",
            "peers that hold whole models and average now and then: another function",
        ),
        System(
            "Decentralised foundation models (2206.01288)",
            "`what_if` chooses a division of equal devices",
            "",
            "a pipeline axis, and devices that differ",
        ),
        System(
            "MoESys (2205.10034)",
            "inputs of layers in the host's memory; slots a layer ahead",
            "memory of the dry run",
            "parameters on SSDs",
        ),
        System(
            "EPS-MoE (2410.12247)",
            "`Moe.halves`: one half travels while the other is computed",
            f"its bound, an exchange that is hidden whole: {hidden:.2f} times as fast",
            "inference; streaming multiprocessors set aside, which XLA has not",
        ),
        System(
            "ExFlow (2401.08383)",
            "policy `hiermoe` moves experts that tokens choose together",
            "rows by distinct destinations (docs/decisions/0038)",
            "inference: a token stays where its next expert is",
        ),
        System(
            "DCT (2010.08899)",
            "compression of experts, not of rows",
            f"rows of 1/20 of the bytes: {compressed:.2f} times as fast (published: "
            "1.37)",
            "compressed rows change the function",
        ),
        System(
            "PPMoE (2304.11414)",
            "`Dispatch.schedule = 'local'`",
            f"{_local():.2f} times as fast as DeepSpeed's order, experts on the 8 GPUs "
            "of a tensor axis (published: above 1.75)",
            "a pipeline axis",
        ),
        System(
            "ScMoE (2404.05019)",
            "`Model.block = 'shortcut'`",
            f"an exchange that attention hides whole: {hidden:.2f} times as fast "
            "(published: 1.49 on PCIe, where it takes 60 % of a step)",
            "",
        ),
        System(
            "DS-MoE (2404.05567)",
            "`Router.training = 'dense'`",
            f"all experts train: {dense_step / total:.1f} times the seconds of a step, "
            f"and {1 + dense.routed * (experts - 1) / (dense.train / 3):.1f} times the "
            "FLOPs",
            "its gains are of inference",
        ),
    ]


def markdown() -> str:
    """Return the table of systems as Markdown."""
    setting = (
        f"Prices are of configs/{QWEN.name} on {clusters.load(CLUSTER)}, an even load, "
        "where nothing else is said."
    )
    lines = [
        setting,
        "",
        "| | runs here | priced | has no meaning here |",
        "|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(system)} |" for system in systems()]
    return "\n".join(lines)


def _step(cfg: Config, cluster: str = CLUSTER) -> StepTime:
    there = clusters.load(cluster)
    return predict(resolved(cfg, there), there.device, 0)


def _square_cube() -> float:
    """Return how many times as much expert work there is for each second of exchange
    when widths are doubled."""
    ratios = []
    for scale in (1, 2):
        cfg = _gpt(scale)
        step = _step(cfg)
        ratios.append(step.experts / step.exchange)
    return ratios[1] / ratios[0]


def _gpt(scale: int) -> Config:
    cfg = configuration(
        Topology(expert=16), layers=12, d_model=1024 * scale, hidden=3072 * scale,
        experts=16, top_k=2, batch=64, length=1024, dtype="bfloat16",
    )  # fmt: skip
    return dataclasses.replace(
        cfg, balance=dataclasses.replace(cfg.balance, policy="home")
    )


def _local() -> float:
    """Return how many times as fast schedule 'local' is as 'base' on one node."""
    cfg = dataclasses.replace(_gpt(1), mesh=Topology(tensor=8))
    sec = {}
    for schedule in ("local", "base"):
        dispatch = dataclasses.replace(
            cfg.dispatch, schedule=schedule, transport="padded"
        )
        named = dataclasses.replace(cfg, dispatch=dispatch)
        sec[schedule] = _step(named, "h100_1x8").total
    return sec["base"] / sec["local"]
