"""The step of one MoE layer under several schedules or domains: shapes, compiled
variants, and the bytes that they send.

A variant is a schedule ('s1', 's1h', ..) or a domain ('1x1' is plain expert
parallelism, '2x1', ..). Its step is forward and backward, with gradients of inputs and
weights. Token number i chooses experts i k, i k + 1, .. (modulo E). Loads are thus
even, and the exchange 'capacity' drops nothing and compiles no later rounds, which
would send nothing. All variants have the same choices and the same numbers.
"""

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from moejax import axes
from moejax.config import Moe, Router
from moejax.moe.layer import MoeLayer
from moejax.moe.mesh_roles import MeshLayout, on_mesh, spec
from moejax.moe.setup import LayerSetup
from moejax.moe.types import Placement
from moejax.moe.weights.stores import master_param_spec
from moejax.perf import choose_domain, choose_schedule, terms
from moejax.perf.calibration import Calibration
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import GROUP_AXES, Layout, Topology
from moejax.plan.parallel import Domain, Tensor
from moejax.plan.schedule_rules import SCHEDULES

ITEMSIZE = 4
"""Bytes of a number: float32, since CPUs emulate bfloat16 slowly."""
DOMAIN = re.compile(r"(\d+)x(\d+)")
COLLECTIVE = re.compile(
    r"= (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter)(?:-start)?\((.*)"
)
ARRAY = re.compile(r"\b(?:f|s|u|bf)(\d+)\[([\d,]*)\]")
LISTED = re.compile(r"replica_groups=\{\{([\d,{}]*)\}\}")
COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
NAMED = re.compile(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}")
AXIS = re.compile(r"'(\w+)'=(\d+)")


@dataclasses.dataclass(frozen=True)
class BenchedLayer:
    """Sizes of one MoE layer in one micro-batch."""

    tokens: int
    """Number of tokens of one tensor group. Each of its devices holds all of them."""
    d_model: int
    d_expert: int
    num_experts: int
    top_k: int
    buffer_factor: float = 1.0
    expert_shards: int | None = None
    """Number of shards of an expert. None: as many as the tensor axis has devices."""

    def __post_init__(self) -> None:
        for name in ("tokens", "d_model", "d_expert", "num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} must be at most num_experts={self.num_experts}"
            )
        if self.buffer_factor < 1:
            raise ValueError(f"buffer_factor={self.buffer_factor} must be at least 1")

    @property
    def row_bytes(self) -> int:
        """Bytes of all rows of a tensor group: D in docs/testbed.md, where there is no
        tensor axis."""
        return self.tokens * self.top_k * self.d_model * ITEMSIZE

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's three matrices."""
        return 3 * self.d_model * self.d_expert * ITEMSIZE


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled variant: `run(*arguments)` computes (loss, dropped) and gradients."""

    run: Any
    arguments: tuple
    leaving_bytes: float
    """Bytes that leave the first DC, by the collectives of the program."""


def parse_domain(variant: str) -> tuple[int, int] | None:
    """Return (S_dc, S_expert) of a variant that is a domain, None for a schedule.
    Raises ValueError for a name that is neither."""
    if match := DOMAIN.fullmatch(variant):
        return int(match[1]), int(match[2])
    if variant not in SCHEDULES:
        raise ValueError(
            f"{variant!r} is not a variant: give {', '.join(SCHEDULES)}, or a domain "
            "such as 2x1"
        )
    return None


def make_layout(shape: BenchedLayer, variant: str, topology: Topology) -> Layout:
    """Return the layout of a variant. Raises ValueError for a variant that cannot run
    on this mesh."""
    shared, tensor = parse_domain(variant), topology.tensor
    choices = shape.tokens * shape.top_k
    if shared is not None:
        if tensor > 1:
            raise ValueError(
                f"variant {variant} is a domain, but Mesh.tensor={tensor}: use tensor=1"
            )
        sizes = (topology.dc, topology.expert)
        domain = Domain(sizes, shared) if math.prod(shared) > 1 else None
        return Layout.home(
            shape.num_experts,
            math.prod(sizes),
            choices,
            buffer_factor=shape.buffer_factor,
            exchange="capacity",
            domain=domain,
            axes=GROUP_AXES["dc_expert"],
        )
    shards = shape.expert_shards or tensor
    rules = SCHEDULES[variant]
    gathered = choices * rules.num_gathered(tensor, shards)
    choices = gathered // rules.num_parts(tensor, shards)
    num_devices = tensor if rules.is_local else topology.expert * tensor // shards
    return Layout.home(
        shape.num_experts,
        num_devices,
        choices,
        # The models do not round rows up either; in such small buffers that matters.
        rows_per_peer=math.ceil(shape.buffer_factor * choices / num_devices),
        exchange="capacity",
        tensor=Tensor(variant, tensor, shards),
        axes=("tensor",) if rules.is_local else GROUP_AXES["expert"],
    )


def compile_step(
    shape: BenchedLayer, variant: str, mesh: Mesh, devices_per_dc: int
) -> Step:
    """Return the compiled step of a variant on float32 numbers. They are drawn from
    fixed seeds, so that all variants compute with the same numbers."""
    topology = Topology(*mesh.devices.shape)
    layout = make_layout(shape, variant, topology)
    mesh_layout = on_mesh(mesh, layout)
    e, k, d = shape.num_experts, shape.top_k, shape.d_model
    moe = Moe(num_experts=e, top_k=k, d_expert=shape.d_expert)
    layer = nnx.eval_shape(lambda: MoeLayer(moe, d, nnx.Rngs(0)))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    setup = LayerSetup(moe, Router(), d, layout, mesh)
    plan = ExpertPlan.home_in(layout, 1).validate(layout)
    placement = jax.tree.map(np.asarray, Placement.from_plan(plan, layout).layer(0))
    rest = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), rest)
    inputs = _inputs(shape, topology, mesh_layout)
    arguments = (
        _draw_params(params, mesh_layout),
        axes.everywhere(rest, mesh),
        *inputs,
    )

    def loss(params, x_btd, rest, forced_btk):
        layer = nnx.merge(graph, params, rest)
        y_btd, sums = layer(x_btd, placement, setup, forced_btk=forced_btk)
        return 0.5 * jnp.mean(y_btd**2), jnp.sum(sums.dropped)

    def step(params, rest, x_btd, forced_btk):
        grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
        return grad(params, x_btd, rest, forced_btk)

    whole = NamedSharding(mesh_layout.mesh, spec())
    where = jax.tree.map(lambda leaf: leaf.sharding, (arguments[0], arguments[2]))
    program = jax.jit(step, out_shardings=((whole, whole), where))
    program = program.lower(*arguments).compile()
    leaving = bytes_leaving(program.as_text(), devices_per_dc)
    return Step(program, arguments, leaving)


def _draw_params(params, mesh_layout: MeshLayout):
    """Return small random weights at the owners of the experts. They do not depend on
    the mesh."""

    def drawn(path, leaf):
        rng, dims = np.random.default_rng(leaf.size), str(path[0].key).split("_")[-1]
        value = rng.standard_normal(leaf.shape, np.float32) * leaf.shape[-2] ** -0.5
        where = (
            spec() if leaf.ndim == 2 else master_param_spec(dims, "owned", mesh_layout)
        )
        return _place(value, NamedSharding(mesh_layout.mesh, where))

    return jax.tree_util.tree_map_with_path(drawn, params)


def _inputs(shape: BenchedLayer, topology: Topology, mesh_layout: MeshLayout) -> tuple:
    """Return x_btd and forced_btk with one sequence per tensor group."""
    b, n, k = topology.num_batch_shards, shape.tokens, shape.top_k
    x_btd = np.random.default_rng(0).standard_normal((b, n, shape.d_model), np.float32)
    forced_nk = (np.arange(n * k) % shape.num_experts).reshape(n, k).astype(np.int32)
    where = NamedSharding(mesh_layout.mesh, spec(mesh_layout.batch_axes))
    forced_btk = np.broadcast_to(forced_nk, (b, n, k))
    return _place(x_btd, where), _place(forced_btk, where)


def _place(value: np.ndarray, where: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, where, lambda at: value[at])


def bytes_leaving(hlo: str, devices_per_dc: int) -> float:
    """Return the bytes that the collectives of a compiled program send from the first
    DC to others.

    Device i is in DC i // devices_per_dc. All collectives but all_to_all are taken to
    be rings.
    """
    total = 0.0
    for line in hlo.splitlines():
        match = COLLECTIVE.search(line)
        if match is None:
            continue
        result, kind, rest = match.groups()
        size = sum(
            int(bits) // 8 * math.prod(int(n) for n in dims.split(",") if n)
            for bits, dims in ARRAY.findall(result)
        )
        for group in _groups(rest):
            total += _leaving(kind, size, [i // devices_per_dc for i in group])
    return total


def _leaving(kind: str, size: float, dc_w: list[int]) -> float:
    """Return the bytes that leave DC 0 in one collective, whose result has `size`
    bytes, between devices that are in the DCs `dc_w`."""
    w = len(dc_w)
    if kind == "all-to-all":
        inside = dc_w.count(0)
        return inside * (w - inside) * size / w
    edges = sum(a == 0 and b != 0 for a, b in zip(dc_w, dc_w[1:] + dc_w[:1]))
    whole = {"all-gather": size, "all-reduce": 2 * size, "reduce-scatter": w * size}
    return edges * whole[kind] * (w - 1) / w


def _groups(rest: str) -> list[list[int]]:
    """Return the devices of each group, by the replica_groups of an instruction."""
    if match := LISTED.search(rest):
        return [[int(i) for i in group.split(",")] for group in match[1].split("},{")]
    if match := NAMED.search(rest):
        size_of = {name: int(size) for name, size in AXIS.findall(match[1])}
        along = [word.strip("' ") for word in match[2].split(",")]
        names = list(size_of)
        order = [names.index(n) for n in names if n not in along]
        order += [names.index(n) for n in along]
        numbers = np.arange(math.prod(size_of.values())).reshape(*size_of.values())
        width = math.prod(size_of[name] for name in along)
        return numbers.transpose(order).reshape(-1, width).tolist()
    if not (match := COUNTED.search(rest)):
        raise ValueError(f"a collective without replica_groups: {rest}")
    shape, dims = ([int(n) for n in match[i].split(",")] for i in (1, 2))
    numbers = np.arange(math.prod(dims)).reshape(dims)
    if match[3]:
        numbers = numbers.transpose([int(n) for n in match[3].split(",")])
    return numbers.reshape(shape).tolist()


def predict_variants(
    shape: BenchedLayer,
    variants: list[str],
    topology: Topology,
    calibration: Calibration,
) -> dict:
    """Return the chosen variant and the predicted seconds of each, as JSON values.

    The variants are all schedules or all domains. Raises ValueError for one that cannot
    run on this mesh.
    """
    predict = _predict_domains if parse_domain(variants[0]) else _predict_schedules
    every = predict(shape, topology, calibration)
    missing = [variant for variant in variants if variant not in every]
    if missing:
        raise ValueError(f"{missing} cannot run: use variants among {', '.join(every)}")
    predictions = {name: p for name, p in every.items() if name in variants}
    return {
        "chosen": terms.first_fastest(predictions),
        "predicted_sec": {name: predictions[name].sec for name in variants},
        "terms_sec": {
            name: {term.name: term.sec for term in predictions[name].terms}
            for name in variants
        },
    }


def _predict_domains(shape: BenchedLayer, topology: Topology, calibration: Calibration):
    sizes = {"dc": topology.dc, "expert": topology.expert}
    owned = shape.num_experts / math.prod(sizes.values())
    flops = 6 * shape.tokens * shape.top_k * shape.d_model * shape.d_expert
    stream = choose_domain.LayerTraffic(
        row_bytes=shape.buffer_factor * shape.row_bytes,
        expert_bytes=owned * shape.expert_bytes,
        pre_expert_sec=0.0,
        expert_sec=flops / calibration.flops_per_sec,
        sizes=sizes,
        is_prefetched=False,
        is_hierarchical=False,
    )
    predictions = choose_domain.choose(stream, calibration).predictions
    return {"x".join(map(str, domain)): p for domain, p in predictions.items()}


def _predict_schedules(
    shape: BenchedLayer, topology: Topology, calibration: Calibration
):
    choice = choose_schedule.choose(
        choose_schedule.MicroBatchShape(
            tokens=shape.tokens,
            d_model=shape.d_model,
            d_expert=shape.d_expert,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            buffer_factor=shape.buffer_factor,
            itemsize=ITEMSIZE,
            tensor=topology.tensor,
            expert_shards=shape.expert_shards or topology.tensor,
            sizes={"expert": topology.expert},
        ),
        calibration,
    )
    return choice.predictions
