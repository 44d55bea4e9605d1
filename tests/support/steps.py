"""Compile small train steps on eight devices, and run steps of them.

configure(family, **parts) -> Config        SMALL with the options of a family
make_case(family, dtype, **parts)           the compiled step
one_step(case, state, plan)                 from and to logical NumPy
check_step(actual, expected, dtype)         loss, gradients, moments and parameters
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moejax.axes import make_mesh
from moejax.config import (
    Attention,
    Balance,
    Config,
    Data,
    Dispatch,
    Mla,
    Model,
    Moe,
    Optimizer,
    Recorded,
    Rope,
    Router,
    Train,
)
from moejax.moe.types import Placement, Windows
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from moejax.resolve.resolved import resolve
from tests.support.close import assert_close
from tests.support.random_plans import random_plan, roomy
from tests.support.resolved import aligned_slots
from train.balance.migrate import Mover
from train.step.compiled import on_devices, trace_train_step
from train.step.expert_params import is_expert
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state
from train.step.step import StepContext, window_sharding

L, E, SLOTS, BATCH, SEQ, WIDTH, HIDDEN = 2, 8, 3, 16, 8, 16, 32
ONE_EXPERT = WIDTH * HIDDEN
"""Number of values in an expert's smallest matrix, more than in any other parameter."""
SMALL = Config(
    mesh=Topology(data=2, expert=4),
    model=Model(
        vocab_size=16, d_model=WIDTH, num_layers=L, num_heads=2, num_kv_heads=2,
        head_dim=4, compute_dtype="float32",
    ),
    # Buffers hold all rows of a peer, unless a test asks for later rounds.
    moe=Moe(num_experts=E, top_k=2, d_expert=HIDDEN),
    dispatch=Dispatch(buffer_factor=1e3),
    # Switch's balance loss is off. It is the only part of the loss that differs between
    # micro-batches and one batch.
    router=Router(balance_loss=0.0, sequence_balance_loss=0.05),
    optimizer=Optimizer(learning_rate=3e-3, warmup_steps=5, eps=1e-6),
    data=Data(seq_len=SEQ),
    train=Train(batch_size=BATCH, num_steps=100, loss_chunk=SEQ),
)  # fmt: skip
OWN = E // SMALL.mesh.expert
STORES = {
    "owned": {"store": "owned", "slots_per_device": OWN},
    "transient": {"store": "transient", "slots_per_device": SLOTS},
    "resident": {"store": "resident", "slots_per_device": SLOTS},
    "dynamic": {
        "store": "transient", "split": "dynamic", "slots_per_device": 2 * OWN,
    },
    "sharded": {"store": "sharded", "slots_per_device": SLOTS},
}  # fmt: skip
"""Fields of Dispatch, with slots for random plans."""
TENSOR = Topology(data=2, expert=2, tensor=2)
TWO_DCS = Topology(dc=2, expert=4)
TWO_DCS_OF_DATA = Topology(dc=2, data=2, expert=2)
DELTA = {
    "group": "dc_expert", "domain": (2, 2), "compression": 8.0,
}  # fmt: skip
"""Fields of Dispatch with which experts travel compressed within domains of TWO_DCS."""

YARN = {"scaling": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "small": {},
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
    "shortcut": {
        "model": {"block": "shortcut", "qk_norm": "full"},
        "moe": {"num_shared_experts": 1},
    },
    "losses": {
        "router": {"kind": "sigmoid", "balance_loss": 0.1, "z_loss": 0.1},
        "train": {"accumulate_steps": 2},
    },
    "jitter": {"router": {"jitter": 0.3}},
    "recorded": {
        "router": {"kind": "recorded", "sequence_balance_loss": 0.0},
        "recorded": Recorded(source="zipf"),
    },
    "dense": {"router": {"training": "dense"}},
}  # fmt: skip
"""Parts of a configuration by family: whole ones, or fields that differ from SMALL's.

The published families have a cycle with several kinds of layers, or a dense prefix, and
most options that they add. Gates of Llama-4's kind multiply the input of two experts a
token. The others are options of routers.
"""

WAYS: dict[str, dict[str, Any]] = {
    "owned": {"dispatch": STORES["owned"]},
    "prefetched": {
        "dispatch": STORES["transient"] | {"prefetch": True, "split": "local_first"},
    },
    "filled": {
        "dispatch": STORES["resident"] | {"split": "water_filling"},
        "balance": Balance(policy="micromoe"), "train": {"accumulate_steps": 2},
    },
    "sharded, in halves": {
        "dispatch": STORES["sharded"] | {"prefetch": True, "split": "local_first"},
        "moe": {"halves": True}, "model": {"remat": "full"},
    },
    "dynamic, later rounds": {
        "dispatch": STORES["dynamic"] | {"buffer_factor": 0.4, "overflow": "rounds"},
        "align_rows": 64,
    },
    "tensor": {
        "mesh": TENSOR, "dispatch": {"schedule": "s1h"},
        "train": {"accumulate_steps": 2}, "model": {"remat": "dispatch"},
    },
    "domain": {
        "mesh": TWO_DCS,
        "dispatch": {"group": "dc_expert", "domain": (2, 2), "prefetch": True},
    },
    "merged": {
        "dispatch": STORES["transient"]
        | {"group": "data_expert", "split": "local_first"},
        "model": {"remat": "full"},
    },
    "transient": {"dispatch": STORES["transient"], "model": {"remat": "full"}},
    "resident, gathered once": {
        "dispatch": STORES["resident"] | {"gather": "step", "prefetch": True},
        "train": {"accumulate_steps": 2}, "model": {"remat": "dispatch"},
    },
    "dynamic, in halves": {
        "dispatch": STORES["dynamic"], "moe": {"halves": True},
        "model": {"remat": "full"},
    },
    "dynamic, gathered once": {
        "dispatch": STORES["dynamic"] | {"gather": "step"},
        "train": {"accumulate_steps": 2},
    },
    "topped up, gathered once": {
        "dispatch": STORES["resident"]
        | {"split": "top_up", "top_up_above": 1.2, "gather": "step"},
        "train": {"accumulate_steps": 2}, "model": {"remat": "full"},
    },
    "topped up between domains": {
        "mesh": TWO_DCS, "moe": {"halves": True},
        "dispatch": {
            "group": "dc_expert", "domain": (1, 2), "prefetch": True,
            "split": "top_up",
        },
    },
    "halves": {"moe": {"halves": True}},
    "halves, later rounds": {
        "dispatch": {"buffer_factor": 0.4, "overflow": "rounds"}, "align_rows": 64,
        "moe": {"halves": True}, "model": {"remat": "none"},
    },
    "halves, gathered once": {
        "dispatch": {"gather": "step", "prefetch": True}, "moe": {"halves": True},
    },
    "merged, sharded": {
        "dispatch": STORES["sharded"] | {"group": "data_expert", "split": "even"},
    },
    "merged, resident": {
        "dispatch": STORES["resident"]
        | {"group": "data_expert", "split": "local_first"},
        "train": {"accumulate_steps": 2},
    },
    "tensor, halves": {
        "mesh": TENSOR, "align_rows": 64, "moe": {"halves": True},
        "dispatch": {"schedule": "s1"}, "model": {"remat": "dispatch"},
    },
    "tensor, shards over expert": {
        "mesh": TENSOR, "dispatch": {"expert_shards": 4, "schedule": "s1h"},
        "model": {"remat": "full"},
    },
    "tensor, whole experts": {
        "mesh": TENSOR, "dispatch": {"expert_shards": 1, "schedule": "s1"},
    },
    "tensor, s2": {
        "mesh": TENSOR, "dispatch": {"schedule": "s2"}, "moe": {"halves": True},
    },
    "tensor, base": {
        "mesh": TENSOR, "dispatch": {"schedule": "base"}, "moe": {"halves": True},
    },
    "tensor, local": {
        "mesh": TENSOR, "dispatch": {"schedule": "local", "gather": "step"},
        "train": {"accumulate_steps": 2},
    },
    "whole domain": {
        "mesh": TWO_DCS, "dispatch": {"group": "dc_expert", "domain": (2, 4)},
        "moe": {"halves": True},
    },
    "domain of two, unfetched": {
        "mesh": TWO_DCS,
        "dispatch": {"group": "dc_expert", "domain": (2, 1), "prefetch": False},
    },
    "domain, copies filled": {
        "mesh": TWO_DCS,
        "dispatch": {
            "group": "dc_expert", "domain": (2, 1), "store": "resident",
            "split": "water_filling", "slots_per_device": 2,
        },
        "balance": Balance(policy="micromoe"), "train": {"accumulate_steps": 2},
    },
    "domain, dynamic, a layer ahead": {
        "mesh": TWO_DCS,
        "dispatch": {
            "group": "dc_expert", "domain": (1, 2), "split": "dynamic",
            "prefetch": True,
        },
        "model": {"remat": "full"},
    },
    "domain over data, gathered once": {
        "mesh": TWO_DCS_OF_DATA,
        "dispatch": {
            "group": "dc_expert", "domain": (2, 1), "store": "resident",
            "gather": "step", "slots_per_device": 3,
        },
    },
    "domain and tensor, sharded": {
        "mesh": Topology(dc=2, expert=2, tensor=2),
        "dispatch": {
            "group": "dc_expert", "domain": (2, 1), "schedule": "s1h",
            "store": "sharded", "slots_per_device": 3, "prefetch": True,
        },
    },
    "hierarchical": {
        "mesh": TWO_DCS,
        "dispatch": {"group": "dc_expert", "transport": "hierarchical"},
    },
    "resident, two data centres": {
        "mesh": Topology(dc=2, data=2, expert=2),
        "dispatch": {
            "store": "resident", "gather": "step", "slots_per_device": 5,
        },
    },
    "experts gathered over data alone": {
        "mesh": Topology(data=8), "dispatch": {"gather": "step"},
        "train": {"accumulate_steps": 2},
    },
    "one device": {
        "mesh": Topology(), "align_rows": 128, "dispatch": {"buffer_factor": 1e3},
    },
}  # fmt: skip
"""Ways to compute the step of a family: arguments of `make_case`. The step is the same
under each."""


@dataclasses.dataclass(frozen=True)
class StepCase:
    """A compiled train step, the shardings of its state, and the program that moves
    experts between owners."""

    model: StepContext
    traced: object
    step: object
    mover: Mover
    shardings: object


def configure(family: str = "small", **parts: Any) -> Config:
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


def model_from(cfg: Config, dtype: str) -> StepContext:
    """Return the context of a configuration, with an optimizer whose state also holds
    the last gradients, and room for any plan."""
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model))
    run = resolve(cfg, make_mesh(cfg.mesh, jax.devices()[: cfg.mesh.num_devices]))
    run = run.relaid(roomy(run.layout))
    object.__setattr__(cfg.model, "compute_dtype", dtype)  # float64 is no choice
    adamw = make_optimizer(cfg.optimizer, cfg.train.num_steps)
    return StepContext(run, optax.chain(keep_gradients(), adamw))


def make_case(
    family: str, dtype: str, align_rows: int = 1, is_exact: bool = False, **parts
) -> StepCase:
    """Return the compiled step of `configure` with these parts. Slots begin at
    multiples of `align_rows`."""
    return _case(configure(family, **parts), dtype, align_rows, is_exact)


@functools.lru_cache(maxsize=8)
def _case(cfg: Config, dtype: str, align_rows: int, is_exact: bool) -> StepCase:
    """Compile a step. Few are kept: each takes thousands of memory areas."""
    with aligned_slots(align_rows):
        return case_maker(model_from(cfg, dtype)._replace(is_exact=is_exact))


def case_maker(model: StepContext) -> StepCase:
    """Compile the train step of a context."""
    traced = trace_train_step(model)
    step = traced.lower().compile()
    args = (model.run, model.optimizer, model.layout.store)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(*args))
    return StepCase(model, traced, step, Mover(model), shardings)


def keep_gradients() -> optax.GradientTransformation:
    """Return a transformation that does not change gradients, and whose state is the
    last gradients."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, _state, _params=None: (grads, grads),
    )


def make_windows(case: StepCase, step: int = 0) -> Windows:
    """Return the data windows of a step in micro-batches, on the devices. Three
    documents begin at other places in each sequence."""
    train = case.model.cfg.train
    rng, shape = np.random.default_rng(step), (train.batch_size, SEQ + 1)
    begin_b2 = np.sort(rng.integers(0, SEQ, (shape[0], 2)))
    place_t = np.arange(SEQ + 1)
    is_begin_bt = (place_t == begin_b2[:, :1]) | (place_t == begin_b2[:, 1:])
    begin_bt = np.maximum.accumulate(np.where(is_begin_bt, place_t, 0), axis=1)
    windows = Windows(rng.integers(0, 16, shape), place_t - begin_bt)
    shape = (train.accumulate_steps, -1, SEQ + 1)
    windows = jax.tree.map(lambda x: x.astype(np.int32).reshape(shape), windows)
    return jax.device_put(windows, window_sharding(case.model.mesh))


def run(case: StepCase, state, plan: ExpertPlan, step: int = 0, *args: int):
    """Return the state and the metrics of a step, on the devices. `args` are further
    arguments, such as the number of updates that a loop-free step takes."""
    placement = on_devices(plan, case.model.layout, case.model.mesh)
    args = [jax.device_put(np.int32(x), case.shardings.step) for x in args]
    return case.step(state, placement, make_windows(case, step), *args)


def one_step(case: StepCase, state, plan: ExpertPlan, step: int = 0, *args: int):
    """Return the state after a step, and the step's metrics.

    Both states are NumPy arrays with experts in logical order.
    """
    state = jax.device_put(in_order(state, plan.owned_le), case.shardings)
    state, metrics = jax.device_get(run(case, state, plan, step, *args))
    return in_order(state, np.argsort(plan.owned_le, axis=1)), metrics


def in_order(state, order_le):
    """Return a state whose experts (master parameters and moments) are in this order in
    each layer."""
    layer_l1 = np.arange(len(order_le))[:, None]

    def ordered(path, leaf):
        return leaf[layer_l1, order_le] if is_expert(path) else leaf

    return jax.tree_util.tree_map_with_path(ordered, state)


def warm_state_of(model: StepContext):
    """Return a NumPy state in logical order whose moments are not zero and whose router
    bias skews loads.

    With zero moments Adam's step is the sign of the gradient, which is arbitrary where
    a gradient is nearly zero.
    """
    rng = np.random.default_rng(0)
    values = {
        ".params": lambda shape: 0.3 * rng.normal(size=shape),
        ".mu": lambda shape: 1e-3 * rng.normal(size=shape),
        ".nu": lambda shape: 1e-5 * rng.uniform(0.5, 1.5, shape),
        ".count": lambda _: 5,
        ".router_bias": lambda _: 0.1 * 0.5 ** np.arange(E),
    }

    def warm(path, leaf):
        makes = [values[name] for name in map(str, path) if name in values]
        value = makes[0](leaf.shape) if makes else 0
        return np.full(leaf.shape, value, leaf.dtype)

    state = abstract_state(model.run, model.optimizer)
    return jax.tree_util.tree_map_with_path(warm, state)


def home(case: StepCase) -> ExpertPlan:
    """Return the plan that keeps every expert on the device that owns it at the
    start."""
    return case.model.run.home_plan()


def other_plan(case: StepCase, rng) -> ExpertPlan:
    """Return a plan with random owners and replicas, as far as the layout has room."""
    cfg = case.model.cfg
    is_tracked = cfg.dispatch.compression is not None
    if is_tracked or cfg.router.training == "dense":
        return home(case)
    return random_plan(rng, case.model.layout, cfg.model.num_moe_layers)


def check_step(actual, expected, dtype, **kwargs) -> None:
    """Assert that two steps agree in loss, gradients, moments, parameters, and the
    tokens of each expert."""
    (state, metrics), (expected_state, expected_metrics) = actual, expected
    tokens = metrics.routing.tokens_lwe, expected_metrics.routing.tokens_lwe
    assert np.array_equal(tokens[0].sum(1), tokens[1].sum(1))
    names = ("loss", "total_loss", "grad_norm")
    for name in names:
        pair = getattr(metrics, name), getattr(expected_metrics, name)
        assert_close(*pair, dtype=dtype, **kwargs)
    assert not metrics.is_skipped
    assert_close(state, expected_state, dtype=dtype, **kwargs)


def routed_step(router: Router):
    """Return SMALL's context with this router, and abstract arguments to trace its step
    with: state, placement and data windows."""
    cfg = dataclasses.replace(SMALL, router=router)
    model = StepContext(resolve(cfg, make_mesh(cfg.mesh)), optax.sgd(0.1))
    state = abstract_state(model.run, model.optimizer)
    placement = Placement.from_plan(ExpertPlan.home_in(model.layout, L), model.layout)
    zeros_abt = np.zeros((1, BATCH, SEQ + 1), np.int32)
    return model, state, placement, Windows(zeros_abt, zeros_abt)
