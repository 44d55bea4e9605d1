"""Parm (arXiv 2407.00599): schedules for tensor, expert and expert-shard
parallelism."""

import itertools

import numpy as np

from moejax.perf.calibration import LEAVING_SHARE, Calibration
from tools.simulated.papers.layers import Layer, tensor_layer
from tools.simulated.papers.row import Row, Table

DEVICES = 32
SIZES = ((2, 2), (2, 4), (4, 2), (4, 4))
"""Devices of the tensor axis (MP) and parts of an expert (ESP)."""
BATCHES, LENGTHS, WIDTHS = (2, 4, 8), (512, 1024, 2048), (1024, 2048, 4096)
RATIOS, FACTORS, CHOICES = (2, 3, 4), (1.2, 2.4), (1, 2)
ALPHA_BETA = {
    "all_to_all": (0.175e-3, 3.06e-10),
    "all_gather": (0.0320e-3, 1.68e-10),
    "reduce_scatter": (0.0391e-3, 1.67e-10),
    "all_reduce": (0.0837e-3, 5.99e-10),
}
"""Seconds, and seconds for a float32 of the larger array, on 8 nodes of four 2080 Ti
with InfiniBand of 100 Gb/s: FSMoE, Fig. 5, of the same group."""
FLOPS_PER_SEC = 2 / 4.42e-14
"""Of the same figure, whose unit is a multiplication and an addition."""
SCHEDULES = ("base", "s1", "s2", "s1h")


def tables() -> list[Table]:
    layer_sec, link_sec = grid()
    whole, links = _speedups(layer_sec), _speedups(link_sec)
    best = np.array([min(x[s] for s in SCHEDULES[1:3]) for x in layer_sec])
    ours = np.array([x["s1h"] for x in layer_sec])
    rows = (
        Row("slowest gain of a layer", 1.13, float(whole.min()), "x",
            note="the paper's are means by cluster, MP and ESP, as far as is known"),
        Row("largest gain of a layer", 5.77, float(whole.max()), "x",
            note="the paper's grid is not public"),
        Row("mean gain", "", float(whole.mean()), "x"),
        Row("the same, of the exchange alone", "",
            f"{links.min():.3g}, {links.mean():.3g}, {links.max():.3g} x",
            note="least, mean and largest"),
        Row("s1h beside the better one of s1 and s2", "",
            f"{(best / ours).mean():.3g} x (mean)",
            note="ours, with rows gathered over shards inside a node"),
        Row("the better one is", "", _shares(layer_sec)),
        Row("BERT-Base and GPT-2, about 3 x", "about 3 x", _models(layer_sec),
            note="layers of width 1024 and a batch of 8: the models' sizes are not "
            "public"),
    )  # fmt: skip
    setting = (
        "DeepSpeed-MoE's order over the better one of S1 and S2, forward and backward. "
        "The paper's 1,296 layers are not public; these are a grid of as many (MP x "
        "ESP, batch, length, width, hidden width over width, capacity factor, top-k), "
        "on the same group's 32 x 2080 Ti, whose lines FSMoE prints. Collectives are "
        "serial here, and links inside a node as slow as between nodes."
    )
    return [Table("Speedups of layers", setting, rows)]


def grid() -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return the seconds of each layer of the grid by schedule, and those of its
    exchange alone."""
    layer_sec, link_sec = [], []
    axes = SIZES, BATCHES, LENGTHS, WIDTHS, RATIOS, FACTORS, CHOICES
    for (tensor, shards), b, t, d, ratio, factor, k in itertools.product(*axes):
        layers = {
            schedule: _layer(schedule, tensor, shards, b * t, d, ratio * d, factor * k)
            for schedule in SCHEDULES
        }
        layer_sec.append({s: x.prediction.sec for s, x in layers.items()})
        link_sec.append({s: x.exchange_sec for s, x in layers.items()})
    return layer_sec, link_sec


def _layer(schedule, tensor, shards, tokens, d_model, d_expert, factor) -> Layer:
    owners = DEVICES // shards
    return tensor_layer(
        equal_elements(tensor, shards), schedule=schedule, tensor=tensor, shards=shards,
        owners=owners, tokens=tokens, factor=factor, d_model=d_model,
        d_expert=d_expert, flops_per_sec=FLOPS_PER_SEC,
    )  # fmt: skip


def equal_elements(tensor: int, shards: int) -> Calibration:
    """Return lines by which a collective of n elements takes the printed start and
    slope, whatever its group.

    FSMoE's lines are over the larger array of a collective, and ours over the bytes
    that leave a device, a share of it that depends on the group. With shards < tensor
    one axis has groups of two sizes, of which the larger counts.
    """
    inner = max(1, shards // tensor)
    expert = DEVICES // tensor
    sizes = {"expert": expert // inner, "tensor": tensor}
    collectives = {}
    for name, (latency_sec, sec) in ALPHA_BETA.items():
        both = DEVICES if name == "all_to_all" else tensor * inner
        collectives[name] = {
            axes: {
                "latency_sec": latency_sec,
                "bytes_per_sec": 4 * LEAVING_SHARE[name](w) / sec,
                "r2": 1.0,
            }
            for axes, w in (sizes | {"expert_tensor": both}).items()
        }
    mesh = {"dc": 1, "data": 1, "expert": expert, "tensor": tensor}
    return Calibration("", mesh, "float32", collectives, 1.0, 1.0, 0.0, "stated")


def _speedups(sec: list[dict[str, float]]) -> np.ndarray:
    return np.array([x["base"] / min(x["s1"], x["s2"]) for x in sec])


def _shares(sec: list[dict[str, float]]) -> str:
    """Return how often S1 and S2 are the better one."""
    first = sum(x["s1"] <= x["s2"] for x in sec)
    return f"S1 in {first}, S2 in {len(sec) - first}"


def _models(sec: list[dict[str, float]]) -> str:
    """Return the gains of layers as BERT and GPT-2 may have had."""
    axes = SIZES, BATCHES, LENGTHS, WIDTHS, RATIOS, FACTORS, CHOICES
    found = [
        _speedups([x])[0]
        for x, (_, b, t, d, ratio, _, _) in zip(sec, itertools.product(*axes))
        if (b, d, ratio) == (8, 1024, 4) and t <= 1024
    ]
    return f"{min(found):.2g} to {max(found):.2g} x"
