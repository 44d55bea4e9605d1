"""MoE layers of another program: their setup, plans that policies make for them, and
the ways in which they can communicate."""

import dataclasses

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from moejax.axes import AXES, BATCH_AXES, MeshAxes, devices_of
from moejax.balance.loads import loads_by_owner
from moejax.balance.policies import check_policy, make_valid_plan
from moejax.choice import Choice
from moejax.config import Balance, Config, Data, Dispatch, Model, Moe, Router, Train
from moejax.kernels.device import device_here
from moejax.moe.layer import check_device
from moejax.moe.setup import LayerSetup
from moejax.perf.calibration import Calibration
from moejax.perf.cluster import of_device
from moejax.perf.cost_model import cost_model
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import ITEMSIZE, Topology
from moejax.resolve.communication import choose_communication
from moejax.resolve.resolved import resolve
from moejax.resolve.speeds import unmeasured


def set_up(
    moe: Moe,
    mesh: Mesh | AbstractMesh,
    batch_shape: tuple[int, int, int],
    *,
    axes: MeshAxes | None = None,
    router: Router | None = None,
    dispatch: Dispatch | None = None,
    policy: str = "home",
) -> LayerSetup:
    """Return the setup of MoE layers: their layout, on a mesh, for a batch.

    `batch_shape` is (batch, length, width) of the layer's input over all devices. In
    exact mode other batches run too: the shape sets the sizes of buffers, and later
    rounds carry what round 0 cannot, because only a trainer can run a step again.
    `axes` says which mesh axis has which role; by default axes have the names of their
    roles: dc, data, expert and tensor. `policy` is the balancing policy that plans will
    come from: it decides how many replicas a device has room for and how weights reach
    them, unless `dispatch` says so. Gradients of experts travel in bfloat16 if x is
    bfloat16, and in float32 otherwise; `dataclasses.replace(setup,
    gradient_reduce_dtype="float32")` returns a setup where they always travel in
    float32.

        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("expert",), devices=jax.devices()[:1])
        >>> setup = set_up(Moe(num_experts=4, d_expert=8), mesh, (2, 16, 32))
        >>> setup.layout.num_slots, setup.layout.rows_per_peer
        (4, 64)

    Raises ValueError, one line, for sizes that do not fit, for a mesh without a needed
    axis, for a batch that does not divide over the mesh, and for what does not go
    together; NotImplementedError for what the mesh's devices cannot run.
    """
    if not isinstance(moe, Moe) or not isinstance(mesh, Mesh | AbstractMesh):
        given = f"{type(moe).__name__} and {type(mesh).__name__}"
        raise ValueError(f"set_up takes a Moe and a Mesh first, and got {given}")
    check_policy(policy)
    topology = (names := axes or MeshAxes.by_role(mesh)).topology(mesh)
    router, dispatch = router or Router(), dispatch or Dispatch()
    dispatch = dataclasses.replace(dispatch, overflow=dispatch.overflow or "rounds")
    _check_parts(moe, router, dispatch)
    cfg = _layer_config(moe, topology, batch_shape, dispatch, router, policy)
    layout = resolve(cfg, mesh).layout
    if isinstance(mesh, Mesh):
        check_device(layout, mesh.devices.flat[0])
    setup = LayerSetup(moe, router, cfg.model.d_model, layout, mesh, names)
    _ = setup.mesh_layout  # raises for sizes that the mesh cannot be cut into
    return setup


def compare_ways(
    moe: Moe,
    mesh: Topology,
    batch_shape: tuple[int, int, int],
    speeds: Calibration,
    dispatch: Dispatch | None = None,
) -> dict[str, Choice]:
    """Return the choices of the communication schedule and of the domain for MoE layers
    in training, with the predicted time of one layer in a step under each: 'schedule'
    and 'domain', where `dispatch` leaves them open ('auto') and the mesh has several.

    No device is needed: `mesh` has the sizes of the axes, and `speeds` their lines.
    `batch_shape` is (batch, length, width) over all devices; loads are even. Raises
    ValueError, one line, for sizes that do not fit, and for speeds without a line that
    a prediction needs.
    """
    dispatch = dispatch or Dispatch(domain="auto")
    cfg = _layer_config(moe, mesh, batch_shape, dispatch, Router(), "home")
    types = (AxisType.Auto,) * len(AXES)
    abstract = AbstractMesh(mesh.sizes, AXES, axis_types=types)
    return choose_communication(cfg, speeds, abstract).choices


def _layer_config(
    moe: Moe,
    mesh: Topology,
    batch_shape: tuple[int, int, int],
    dispatch: Dispatch,
    router: Router,
    policy: str,
) -> Config:
    """Return the configuration of a run whose MoE layers are these."""
    if len(batch_shape) != 3:
        raise ValueError(
            f"batch_shape={batch_shape} must be (batch, length, width) of the input"
        )
    b, t, d = batch_shape
    if b % mesh.num_batch_shards:
        raise ValueError(
            f"a batch of {b} sequences does not divide over {mesh.num_batch_shards} "
            f"devices ({mesh}): use a multiple of {mesh.num_batch_shards}"
        )
    return Config(
        mesh=mesh,
        model=Model(d_model=d),
        moe=moe,
        dispatch=dispatch,
        router=router,
        data=Data(seq_len=max(t, 2)),
        train=Train(batch_size=b, loss_chunk=max(t, 2)),
        balance=Balance(policy=policy),
    )


def _check_parts(moe: Moe, router: Router, dispatch: Dispatch) -> None:
    """Raise ValueError for what takes more than one layer."""
    if moe.num_shared_experts:
        raise ValueError(
            f"Moe.num_shared_experts={moe.num_shared_experts} are dense, and no part "
            "of this layer: add them in your model, and set it to 0"
        )
    if dispatch.compression is not None:
        raise ValueError(
            "copies of compressed experts are state of a training loop "
            "(train/step/state.py), which one layer does not have: leave "
            "Dispatch.compression out"
        )
    if dispatch.overflow == "redo":
        raise ValueError(
            "Dispatch.overflow='redo' drops rows of a step that the trainer then runs "
            "again, which one layer cannot do: use 'rounds' or None"
        )
    if router.training == "dense":
        raise ValueError(
            "Router.training='dense' is another layer, which the trainer calls "
            "(moejax/moe/dense.py): use 'sparse'"
        )


def make_plan(
    policy: str,
    tokens_lwe: np.ndarray,
    setup: LayerSetup,
    current: ExpertPlan | None = None,
    dtype: str = "bfloat16",
    together_lee: np.ndarray | None = None,
) -> ExpertPlan:
    """Return the plan that a policy makes for loads, valid for the setup's layout.

    `tokens_lwe` are choices of each expert in each layer, by device that splits the
    batch: `sums.tokens_e` of one layer, with a leading dim of layers. `current` is the
    plan that runs now (default: the home plan). `dtype` is that of experts' arithmetic.
    Costs are of presumed speeds: 50 TFLOP/s and 12.5 GB/s. `together_lee` are the
    tokens that chose both of two experts (RoutingStats), for policy 'hiermoe'.

    Raises ValueError where the layout has no room for what the policy plans.
    """
    if not (isinstance(policy, str) and isinstance(setup, LayerSetup)):
        raise ValueError(
            "make_plan takes a policy's name, loads and a LayerSetup, and got "
            f"{type(policy).__name__}, loads and {type(setup).__name__}"
        )
    tokens_lwe, layout = np.asarray(tokens_lwe), setup.layout
    stores = check_policy(policy).stores
    if layout.store not in stores:
        raise ValueError(
            f"policy '{policy}' plans for store {' or '.join(map(repr, stores))}, and "
            f"the layout has '{layout.store}': use set_up(.., policy='{policy}')"
        )
    topology = setup.axes.topology(setup.mesh)
    roles = [setup.axes.role(axis) for axis in setup.mesh.axis_names]
    sizes = {r: getattr(topology, r) for r in roles if r in BATCH_AXES}
    expected = (setup.num_batch_shards, layout.num_experts)
    if tokens_lwe.ndim != 3 or tokens_lwe.shape[1:] != expected:
        raise ValueError(
            f"loads must be [layers, {expected[0]}, {expected[1]}]: choices by layer, "
            f"device and expert; they are {list(tokens_lwe.shape)}"
        )
    shards = 1 if layout.tensor is None else layout.tensor.expert_shards
    with devices_of(setup.mesh):
        kind = device_here().device_kind
    cost = cost_model(
        unmeasured(topology, kind, of_device(kind, topology.num_devices)),
        d_model=setup.d_model,
        d_expert=setup.moe.d_expert // shards,
        itemsize=ITEMSIZE[dtype],
        micro_batches=1,
        other_flops_per_device=0.0,
        group=layout.axes,
    )
    if current is None:
        current = setup.home_plan(len(tokens_lwe))
    load_lwe = loads_by_owner(tokens_lwe, sizes, layout)
    args = load_lwe, layout, cost, current, together_lee
    return make_valid_plan(policy, check_policy(policy), *args)
