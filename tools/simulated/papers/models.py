"""Whole models of the papers as configurations, priced under each policy."""

import functools
import pathlib

from moejax.config import Balance, Config, Data, Dispatch, Model, Moe, Train
from moejax.perf.cluster import Cluster
from moejax.plan.layout import Topology
from moejax.resolve.partition import rows_per_step
from moejax.resolve.resolved import Resolved, resolve
from moejax.resolve.step_time import Scene, StepTime
from tools.simulated.loads import pairs
from tools.simulated.what_if import changes, mean_time, step_time
from train.dry_run import abstract_gpu, abstract_mesh

TRACE = pathlib.Path(__file__).resolve().parents[3] / "tests/golden/routing.npz"
"""Twenty samples of a GPT without an effective balancing loss (SmartMoE's artifact,
USENIX ATC'23): the skew that the papers' first iterations have, and not their own."""
NAMES = {
    "home": "home in store owned",
    "fastermoe": "fastermoe in store transient",
    "prophet": "prophet in store transient",
    "flexmoe": "flexmoe in store resident",
    "micromoe": "micromoe in store resident",
    "smartmoe": "smartmoe in store owned",
}
"""Methods of balancing that stand for systems, by policy."""


def configuration(
    mesh: Topology,
    *,
    layers: int,
    d_model: int,
    hidden: int,
    experts: int,
    top_k: int,
    batch: int,
    length: int,
    micro_batches: int = 1,
    dtype: str = "float32",
    group: str = "expert",
) -> Config:
    """Return the configuration of a GPT with an MoE layer in each block. Experts of the
    papers have two matrices of width `hidden`; ours have three of 2/3 of it, with as
    many weights and FLOPs. Rows travel as they are (transport 'ragged'), as in the
    papers' systems."""
    width = round(2 * hidden / 3 / 16) * 16
    return Config(
        mesh=mesh,
        model=Model(
            vocab_size=50304, d_model=d_model, num_layers=layers,
            num_heads=d_model // 64, num_kv_heads=d_model // 64, head_dim=64,
            compute_dtype=dtype,
        ),
        moe=Moe(num_experts=experts, top_k=top_k, d_expert=width),
        dispatch=Dispatch(transport="ragged", group=group),
        data=Data(seq_len=length),
        train=Train(
            batch_size=batch, accumulate_steps=micro_batches, loss_chunk=length
        ),
        balance=Balance(policy="auto"),
    )  # fmt: skip


def resolved(cfg: Config, cluster: Cluster) -> Resolved:
    """Return the run on devices of a cluster, whose memory does not count."""
    mesh = abstract_mesh(cfg, abstract_gpu(cluster.device.name))
    return resolve(cfg, mesh, None, cluster)


@functools.lru_cache(maxsize=64)
def times(cfg: Config, cluster: Cluster, load: str) -> dict[str, StepTime]:
    """Return the predicted time of a step under each policy of NAMES that can run."""
    run = resolved(cfg, cluster)
    layout = run.layout
    rows = rows_per_step(cfg, layout) * layout.num_devices
    policies = {name: policy for policy, name in NAMES.items()}
    found: dict[str, list[StepTime]] = {}
    sizes = layout.num_devices, layout.num_experts, cfg.model.num_moe_layers
    for pair in pairs(load, *sizes):
        for method, (plan, there) in changes(run, pair, rows).items():
            if policy := policies.get(str(method)):
                scene = Scene(rows * pair.met_lwe, plan, there)
                found.setdefault(policy, []).append(
                    step_time(run, cluster.device, scene)
                )
    return {policy: mean_time(steps) for policy, steps in found.items()}


def gain(found: dict[str, StepTime], policy: str, over: str = "home") -> float:
    """Return how many times as fast one policy is as another."""
    return found[over].total / found[policy].total
