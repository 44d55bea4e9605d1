"""Plans of every kind, for tests, and a small train step under each store.

random_plan, odd_plans, policy_plans     at random; such as only a mistake makes
make_case(store, dtype) -> Case          compiled once, eight devices
one_step(case, state, plan)              from and to logical NumPy
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from moejax.axes import make_mesh
from moejax.balance.policies import POLICIES
from moejax.config import Config, Data, Dispatch, Moe, Optimizer, Router, Train
from moejax.config import Model as ModelConfig
from moejax.moe.types import Windows
from moejax.perf.cost_model import NOTES
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from train.balance.migrate import Mover
from train.layouts import layout_of
from train.step.compiled import home_plan, on_devices, trace_train_step
from train.step.expert_params import is_expert
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state
from train.step.step import Model, window_sharding

L, E, SLOTS, BATCH, SEQ, WIDTH, HIDDEN = 2, 8, 3, 16, 8, 16, 32
ONE_EXPERT = WIDTH * HIDDEN
"""Values of its smallest matrix: more than any other parameter has."""
QUICK = {"xla_backend_optimization_level": 0}  # compiled in half the time
SMALL = Config(
    mesh=Topology(data=2, expert=4),
    model=ModelConfig(
        vocab_size=16, d_model=WIDTH, num_layers=L, num_heads=1, num_kv_heads=1,
        head_dim=8, compute_dtype="float32",
    ),
    # Room for all rows of a peer: later rounds are the subject of test_layer.py.
    moe=Moe(num_experts=E, top_k=2, d_expert=HIDDEN),
    dispatch=Dispatch(rows_per_peer=BATCH * SEQ),
    # Without Switch's loss, which alone would tell micro-batches from one batch.
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
class Case:
    """A compiled train step, where its state lies, and the moves between owners."""

    model: Model
    traced: object
    step: object
    mover: Mover
    shardings: object


def make_model(store: str, dtype: str, split=None, **model_changes) -> Model:
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
    )
    object.__setattr__(cfg.model, "compute_dtype", dtype)  # float64 is no choice
    mesh = make_mesh(cfg.mesh)
    adamw = make_optimizer(cfg.optimizer, cfg.train.num_steps)
    return Model(cfg, mesh, layout_of(cfg), optax.chain(keep_gradients(), adamw))


@functools.cache
def make_case(*args, **kwargs) -> Case:
    return make_case_of(make_model(*args, **kwargs))


def make_case_of(model: Model) -> Case:
    traced = trace_train_step(model)
    step = traced.lower().compile(compiler_options=QUICK)
    args = (model.cfg, model.mesh, model.optimizer, model.layout.store)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(*args))
    return Case(model, traced, step, Mover(model), shardings)


def keep_gradients() -> optax.GradientTransformation:
    """Changes nothing; its state is the last gradient."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, _state, _params=None: (grads, grads),
    )


def windows_of(case: Case, step: int) -> Windows:
    """Tokens of one step, in micro-batches."""
    shape = (case.model.cfg.train.accumulate_steps, -1, SEQ + 1)
    token_bt = np.random.default_rng(step).integers(0, 16, (BATCH, SEQ + 1))
    position_bt = np.broadcast_to(np.arange(SEQ + 1), token_bt.shape)
    windows = Windows(token_bt, position_bt)
    windows = jax.tree.map(lambda x: x.astype(np.int32).reshape(shape), windows)
    return jax.device_put(windows, window_sharding(case.model.mesh))


def run(case: Case, state, plan: ExpertPlan, step: int):
    placement = on_devices(plan, case.model.layout, case.model.mesh)
    return case.step(state, placement, windows_of(case, step))


def one_step(case: Case, state, plan: ExpertPlan, step: int = 0):
    """The state after a step from `state`, both logical and NumPy, and the metrics."""
    state = jax.device_put(in_order(state, plan.owned_le), case.shardings)
    state, metrics = jax.device_get(run(case, state, plan, step))
    return in_order(state, np.argsort(plan.owned_le, axis=1)), metrics


def in_order(state, order_le):
    """Experts' masters and moments of each layer taken in this order."""
    layer_l1 = np.arange(L)[:, None]

    def ordered(path, leaf):
        return leaf[layer_l1, order_le] if is_expert(path) else leaf

    return jax.tree_util.tree_map_with_path(ordered, state)


@functools.cache
def warm_state(dtype: str):
    """Logical, NumPy: moments are warm, for at zero Adam's step is a sign, and chance
    where a gradient is all but zero; a bias skews loads."""
    model, rng = make_model("owned", dtype), np.random.default_rng(0)
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

    state = abstract_state(model.cfg, model.mesh, model.optimizer)
    return jax.tree_util.tree_map_with_path(warm, state)


def home(case: Case) -> ExpertPlan:
    return home_plan(case.model.cfg, case.model.layout)


def random_plan(rng, layout: Layout, num_layers: int) -> ExpertPlan:
    """Every expert somewhere, the other slots anything or empty; owners at random.

    For layouts with room for all copies: offers of every expert, copies in every slot.
    """
    rows = [_random_row(rng, layout) for _ in range(num_layers)]
    owned_le = random_owners(rng, layout.num_experts, num_layers)
    if layout.store == "owned":
        return ExpertPlan(owned_le, layout.num_experts, owned_le)
    if layout.split == "dynamic":
        return owners_alone(layout, owned_le)
    if layout.store == "sharded":
        owned_le = None
    return ExpertPlan(np.stack(rows), layout.num_experts, owned_le)


def owners_alone(layout: Layout, owned_le: np.ndarray) -> ExpertPlan:
    """Own experts in the first slots, the others empty: dynamic replication fills
    them."""
    w, own = layout.num_devices, layout.experts_per_device
    table_lws = np.full((len(owned_le), w, layout.slots_per_device), -1, np.int32)
    table_lws[:, :, :own] = owned_le.reshape(len(owned_le), w, own)
    table_lp = table_lws.reshape(len(owned_le), -1)
    return ExpertPlan(table_lp, layout.num_experts, owned_le)


def random_owners(rng, num_experts: int, num_layers: int) -> np.ndarray:
    order = [rng.permutation(num_experts) for _ in range(num_layers)]
    return np.stack(order).astype(np.int32)


def odd_plans(layout: Layout, num_layers: int) -> dict[str, ExpertPlan]:
    """A hot expert on all devices; all replicas on one, which is not the owner and
    has nothing else; a device that computes nothing."""
    w, s, own = (
        layout.num_devices,
        layout.slots_per_device,
        layout.experts_per_device,
    )
    home_ws = ExpertPlan.home_in(layout, 1).slot_to_expert_lp.reshape(w, s)
    hot_ws, crowd_ws, idle_ws = home_ws.copy(), home_ws.copy(), home_ws.copy()
    hot_ws[1:, own] = 0
    crowd_ws[w - 1] = 0  # its own experts go to the free slots of others
    crowd_ws[0, 0] = -1
    crowd_ws[:own, own] = home_ws[w - 1, :own]
    idle_ws[w - 1] = -1
    idle_ws[:own, own] = home_ws[w - 1, :own]
    tables = {
        "hot expert on all devices": hot_ws,
        "all replicas on one device": crowd_ws,
        "idle device": idle_ws,
    }
    return {
        name: ExpertPlan(
            np.tile(table_ws.reshape(-1), (num_layers, 1)), layout.num_experts
        ).validate(layout)
        for name, table_ws in tables.items()
    }


def policy_plans(layout: Layout, num_layers: int) -> dict[str, ExpertPlan]:
    """What each policy makes of a skewed load, brought to this layout."""
    rng = np.random.default_rng(7)
    w, e = layout.num_devices, layout.num_experts
    share_le = rng.permuted(np.tile(2.0 ** -np.arange(e), (num_layers, 1)), axis=1)
    load_lwe = np.round(400 * share_le[:, None] * rng.uniform(0.5, 1.5, (1, w, e)))
    plans = {}
    for name, policy in POLICIES.items():
        if layout.store == "owned" and "owned" not in policy.stores:
            continue
        native = layout
        if layout.store not in policy.stores:
            native = _with_store(layout, policy.stores[0])
        current = ExpertPlan.home_in(native, num_layers)
        plan = policy.plan(load_lwe, native, NOTES, current)
        plans[name] = plan if native == layout else plan.resized(layout)
        plans[name].validate(layout)
    return plans


def _with_store(layout: Layout, store: str) -> Layout:
    """The same slots under another store, and room for every copy."""
    own, copies = layout.experts_per_device, layout.slots_per_device
    has_copies = store in ("transient", "resident")
    return dataclasses.replace(
        layout,
        store=store,
        slots_per_device=own if store == "owned" else copies,
        offers_per_device=own if has_copies else 0,
        copies_per_device=copies if has_copies else 0,
        prefetch=False,
    )


def _random_row(rng, layout: Layout) -> np.ndarray:
    every_e = np.arange(layout.num_experts)
    rest = rng.integers(-1, layout.num_experts, layout.num_slots - len(every_e))
    return rng.permutation(np.r_[every_e, rest]).astype(np.int32)
