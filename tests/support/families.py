"""Small models with the options of published families, for train steps on devices.

Each has a cycle with several kinds of layers, or a dense prefix, and most options that
its family adds. `configure` sets further fields, each in the part that has it.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from moejax.config import Attention, Config, Mla, Rope
from moejax.moe.types import Windows
from moejax.plan.expert_plan import ExpertPlan
from tests.support.random_plans import owners_alone, random_plan
from tests.support.steps import SEQ, SMALL, StepCase, case_maker, in_order, model_from
from train.step.compiled import on_devices
from train.step.step import window_sharding

YARN = {"scaling": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = {
    "gpt_oss": {
        "model": {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
        "attention": Attention(
            layers=("sliding", "full"), sliding_window=3, bias="all", sinks=True
        ),
        "rope": Rope(**YARN, truncate=False),
        "moe": {
            "expert_bias": True, "activation": "clamped_swiglu", "swiglu_limit": 0.5,
        },
        "router": {"bias": True},
    },
    "deepseek": {
        "model": {
            "num_layers": 3, "first_k_dense": 1, "d_ff": 48, "num_heads": 4,
            "num_kv_heads": 4,
        },
        "mla": Mla(
            kv_lora_rank=8, q_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=4,
            v_head_dim=6,
        ),
        "rope": Rope(**YARN, mscale=1.0, mscale_all_dim=1.0),
        "moe": {"num_shared_experts": 2},
        "router": {
            "kind": "sigmoid", "num_groups": 4, "top_groups": 2, "gate_scale": 2.5,
            "bias_rate": 0.01,
        },
    },
    "llama4": {
        "model": {"num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
        "attention": Attention(
            layers=("chunked", "nope"), chunk_size=3, temperature_scale=0.5,
            temperature_floor=2, l2_norm=True,
        ),
        "rope": Rope(
            scaling="llama3", factor=8.0, original_max_position_embeddings=64
        ),
        "moe": {"num_shared_experts": 1},
        "router": {"kind": "sigmoid", "normalise_gates": False, "gate_input": True},
    },
}  # fmt: skip
"""Parts of a configuration by family: whole ones, or fields that differ from SMALL's.
Gates of Llama-4's kind multiply the input of two experts a token."""


def configure(family: str, **parts: Any) -> Config:
    """Return SMALL with the options of a family and `parts`: dicts of fields by part of
    the configuration, or whole parts."""
    values = {}
    for name in FAMILIES[family] | parts:
        value = getattr(SMALL, name)
        for change in (FAMILIES[family].get(name), parts.get(name)):
            if isinstance(change, dict):
                value = dataclasses.replace(value, **change)
            elif change is not None:
                value = change
        values[name] = value
    return dataclasses.replace(SMALL, **values)


@functools.lru_cache(maxsize=2)
def _case(cfg: Config) -> StepCase:
    """Compile a step. Few are kept: each takes thousands of memory areas."""
    return case_maker(model_from(cfg, "float32"))


def make_case(family: str, **parts: Any) -> StepCase:
    """Return the compiled step of `configure` with these arguments."""
    return _case(configure(family, **parts))


def make_windows(case: StepCase) -> Windows:
    """Return data windows of three documents, which begin at other places in each
    sequence."""
    train = case.model.cfg.train
    rng, shape = np.random.default_rng(4), (train.batch_size, SEQ + 1)
    begin_b2 = np.sort(rng.integers(0, SEQ, (shape[0], 2)))
    place_t = np.arange(SEQ + 1)
    is_begin_bt = (place_t == begin_b2[:, :1]) | (place_t == begin_b2[:, 1:])
    begin_bt = np.maximum.accumulate(np.where(is_begin_bt, place_t, 0), axis=1)
    windows = Windows(rng.integers(0, 16, shape), place_t - begin_bt)
    shape = (train.accumulate_steps, -1, SEQ + 1)
    windows = jax.tree.map(lambda x: x.astype(np.int32).reshape(shape), windows)
    return jax.device_put(windows, window_sharding(case.model.mesh))


def make_plan(case: StepCase) -> ExpertPlan:
    """Return a plan with random owners and replicas, if the layout has room."""
    layout, num_layers = case.model.layout, case.model.cfg.model.num_moe_layers
    rng, num_experts = np.random.default_rng(1), layout.num_experts
    if layout.domain is not None:
        return case.model.run.home_plan()
    if layout.split == "dynamic":
        order_e = np.arange(num_experts, dtype=np.int32)
        return owners_alone(layout, np.tile(order_e, (num_layers, 1)))
    return random_plan(rng, layout, num_layers)


def one_step(case: StepCase, state, plan: ExpertPlan, *args):
    """Return the state after a step, with experts in logical order, and its metrics;
    NumPy to NumPy. `args` are further arguments of the step, such as the number of
    updates that a loop-free one takes."""
    state = jax.device_put(in_order(state, plan.owned_le), case.shardings)
    placement = on_devices(plan, case.model.layout, case.model.mesh)
    args = [jax.device_put(np.int32(x), case.shardings.step) for x in args]
    windows = make_windows(case)
    state, metrics = jax.device_get(case.step(state, placement, windows, *args))
    return in_order(state, np.argsort(plan.owned_le, axis=1)), metrics
