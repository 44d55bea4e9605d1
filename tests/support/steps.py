"""Compile a small train step under each store on eight devices, and run steps of it.

make_case(store, dtype) -> StepCase      the compiled step
one_step(case, state, plan)              from and to logical NumPy
check_step(actual, expected, dtype)      loss, gradients, moments and parameters
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moejax.axes import make_mesh
from moejax.config import (
    Balance,
    Config,
    Data,
    Dispatch,
    Model,
    Moe,
    Optimizer,
    Router,
    Train,
)
from moejax.moe.types import Placement, Windows
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from moejax.resolve.resolved import resolve
from tests.support.close import assert_close
from train.balance.migrate import Mover
from train.step.compiled import on_devices, trace_train_step
from train.step.expert_params import is_expert
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state
from train.step.step import StepContext, window_sharding

L, E, SLOTS, BATCH, SEQ, WIDTH, HIDDEN = 2, 8, 3, 16, 8, 16, 32
ONE_EXPERT = WIDTH * HIDDEN
"""Number of values in an expert's smallest matrix, more than in any other parameter."""
QUICK = {"xla_backend_optimization_level": 0}  # compiled in half the time
SMALL = Config(
    mesh=Topology(data=2, expert=4),
    model=Model(
        vocab_size=16, d_model=WIDTH, num_layers=L, num_heads=2, num_kv_heads=2,
        head_dim=4, compute_dtype="float32",
    ),
    # Buffers hold all rows of a peer; test_layer.py tests later rounds.
    moe=Moe(num_experts=E, top_k=2, d_expert=HIDDEN),
    dispatch=Dispatch(rows_per_peer=BATCH * SEQ),
    # Switch's balance loss is off. It is the only part of the loss that differs between
    # micro-batches and one batch.
    router=Router(balance_loss=0.0, sequence_balance_loss=0.05),
    optimizer=Optimizer(learning_rate=3e-3, warmup_steps=5, eps=1e-6),
    data=Data(seq_len=SEQ),
    train=Train(batch_size=BATCH, num_steps=100, loss_chunk=SEQ),
)  # fmt: skip
OWN = E // SMALL.mesh.expert
COPIES = {"offers_per_device": OWN, "copies_per_device": SLOTS}
STORES = {
    "owned": {"store": "owned", "slots_per_device": OWN},
    "transient": {"store": "transient", **COPIES},
    "prefetched": {"store": "transient", "prefetch": True, **COPIES},
    "resident": {"store": "resident", **COPIES},
    "filled": {"store": "resident", **COPIES},
    "dynamic": {
        "store": "transient", "slots_per_device": 2 * OWN, "offers_per_device": OWN,
        "copies_per_device": OWN,
    },
    "sharded": {"store": "sharded"},
}  # fmt: skip
SPLITS = {
    "prefetched": "local_first",
    "sharded": "local_first",
    "filled": "water_filling",
    "dynamic": "dynamic",
}
MICRO_BATCHES = {"resident": 2, "filled": 2}


@dataclasses.dataclass(frozen=True)
class StepCase:
    """A compiled train step, the shardings of its state, and the program that moves
    experts between owners."""

    model: StepContext
    traced: object
    step: object
    mover: Mover
    shardings: object


def make_model(store: str, dtype: str, split=None, **model_changes) -> StepContext:
    """Return the context of SMALL with a store of STORES; `model_changes` are fields of
    Model, and 'mesh'."""
    split = split or SPLITS.get(store, "even")
    fields = {"slots_per_device": SLOTS, "split": split, **STORES[store]}
    mesh_sizes = model_changes.pop("mesh", SMALL.mesh)
    micro_batches = MICRO_BATCHES.get(store, 1)
    cfg = dataclasses.replace(
        SMALL,
        mesh=mesh_sizes,
        model=dataclasses.replace(SMALL.model, **model_changes),
        dispatch=dataclasses.replace(SMALL.dispatch, **fields),
        train=dataclasses.replace(SMALL.train, accumulate_steps=micro_batches),
        # Plans come from the tests; a run must have a policy that makes replicas.
        balance=Balance(policy="micromoe" if split == "water_filling" else "home"),
    )
    return model_from(cfg, dtype)


def model_from(cfg: Config, dtype: str) -> StepContext:
    """Return the context of a configuration, with an optimizer whose state also holds
    the last gradients."""
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model))
    run = resolve(cfg, make_mesh(cfg.mesh, jax.devices()[: cfg.mesh.num_devices]))
    object.__setattr__(cfg.model, "compute_dtype", dtype)  # float64 is no choice
    adamw = make_optimizer(cfg.optimizer, cfg.train.num_steps)
    return StepContext(run, optax.chain(keep_gradients(), adamw))


@functools.cache
def make_case(*args, **kwargs) -> StepCase:
    """Return the compiled step of `make_model` with these arguments."""
    return case_maker(make_model(*args, **kwargs))


def case_maker(model: StepContext) -> StepCase:
    """Compile the train step of a context."""
    traced = trace_train_step(model)
    step = traced.lower().compile(compiler_options=QUICK)
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


def make_windows(case: StepCase, step: int) -> Windows:
    """Return the data windows of one step, in micro-batches and on the devices."""
    shape = (case.model.cfg.train.accumulate_steps, -1, SEQ + 1)
    token_bt = np.random.default_rng(step).integers(0, 16, (BATCH, SEQ + 1))
    position_bt = np.broadcast_to(np.arange(SEQ + 1), token_bt.shape)
    windows = Windows(token_bt, position_bt)
    windows = jax.tree.map(lambda x: x.astype(np.int32).reshape(shape), windows)
    return jax.device_put(windows, window_sharding(case.model.mesh))


def run(case: StepCase, state, plan: ExpertPlan, step: int):
    """Return the state and the metrics of a step, on the devices."""
    placement = on_devices(plan, case.model.layout, case.model.mesh)
    return case.step(state, placement, make_windows(case, step))


def one_step(case: StepCase, state, plan: ExpertPlan, step: int = 0):
    """Return the state after a step, and the step's metrics.

    Both states are NumPy arrays with experts in logical order.
    """
    state = jax.device_put(in_order(state, plan.owned_le), case.shardings)
    state, metrics = jax.device_get(run(case, state, plan, step))
    return in_order(state, np.argsort(plan.owned_le, axis=1)), metrics


def in_order(state, order_le):
    """Return a state whose experts (master parameters and moments) are in this order in
    each layer."""
    layer_l1 = np.arange(len(order_le))[:, None]

    def ordered(path, leaf):
        return leaf[layer_l1, order_le] if is_expert(path) else leaf

    return jax.tree_util.tree_map_with_path(ordered, state)


@functools.cache
def warm_state(dtype: str):
    """Return the state of `warm_state_of` for SMALL."""
    return warm_state_of(make_model("owned", dtype))


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
