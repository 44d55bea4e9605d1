"""The configuration of a run, and the rules between its parts."""

import dataclasses
import math
from typing import Any

from moejax.config.attention import Attention, Mla, Rope
from moejax.config.checks import (
    MAX_INT32,
    MAX_TABLE,
    require,
    require_choices,
)
from moejax.config.dispatch import Dispatch, Recorded
from moejax.config.network import Model, Moe, Network, Router
from moejax.config.training import (
    Balance,
    Checkpoint,
    Data,
    Optimizer,
    Processes,
    Train,
)
from moejax.plan.groups import uneven_group
from moejax.plan.layout import Topology
from moejax.plan.parallel import Domain, Tensor
from moejax.plan.schedule_rules import UNSPLIT


@dataclasses.dataclass(frozen=True)
class Config:
    """Configuration of one run, in which every rule between two parts holds."""

    mesh: Topology = Topology()
    model: Model = Model()
    attention: Attention = Attention()
    rope: Rope = Rope()
    mla: Mla = Mla()
    moe: Moe = Moe()
    dispatch: Dispatch = Dispatch()
    router: Router = Router()
    recorded: Recorded = Recorded()
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    processes: Processes = Processes()
    balance: Balance = Balance()

    def __post_init__(self) -> None:
        moe, mesh, train = self.moe, self.mesh, self.train
        for part in dataclasses.fields(self):
            require_choices(getattr(self, part.name))
        check_shards(self)
        layers = self.model.num_moe_layers
        require(
            layers * moe.num_experts <= MAX_TABLE,
            f"Moe.num_experts={moe.num_experts} in {layers} layers "
            f"(Model.num_layers={self.model.num_layers}) is more than {MAX_TABLE} "
            "experts: every device has a table of all of them",
        )
        slots = (self.dispatch.slots_per_device or 1) * self.group_size * layers
        require(
            slots <= MAX_TABLE,
            f"Dispatch.slots_per_device={self.dispatch.slots_per_device} on "
            f"{self.group_size} owners in {layers} layers is more than {MAX_TABLE} "
            "slots: every device has a table of all of them",
        )
        uneven = uneven_group(moe.num_experts, self.group_size, self.group_axes)
        require(not uneven, f"Moe.{uneven}")
        shards = mesh.num_batch_shards * train.accumulate_steps
        require(
            train.batch_size % shards == 0,
            f"Train.batch_size={train.batch_size} must be a multiple of {shards}: "
            "dc x data x expert devices times "
            f"accumulate_steps={train.accumulate_steps}",
        )
        require(
            train.batch_size * self.data.seq_len <= MAX_INT32,
            f"Train.batch_size={train.batch_size} sequences of "
            f"Data.seq_len={self.data.seq_len} are more than {MAX_INT32} tokens: rows "
            "are counted in int32",
        )
        simulated = train.num_simulated_devices
        require(
            simulated is None or simulated == mesh.num_devices,
            f"Mesh ({mesh}) has {mesh.num_devices} devices, and "
            f"Train.num_simulated_devices={simulated}: make them equal",
        )
        self.network.check_tensor(mesh.tensor)
        self._check_experts()
        self._check_nodes()
        self._check_cycle()
        if self.network.is_latent:
            self._check_latent()
        self._check_rope()
        groups = self.router.num_groups
        require(
            moe.num_experts % groups == 0
            and moe.top_k <= moe.num_experts // groups * self.router.top_groups,
            f"Router.num_groups={groups} must divide num_experts={moe.num_experts}, "
            f"and top_groups={self.router.top_groups} of them must hold "
            f"top_k={moe.top_k} experts",
        )
        require(
            self.data.seq_len % min(train.loss_chunk, self.data.seq_len) == 0,
            f"Data.seq_len={self.data.seq_len} must be a multiple of "
            f"Train.loss_chunk={train.loss_chunk}",
        )

    def _check_nodes(self) -> None:
        """Raise ValueError unless nodes divide devices, and groups of experts too where
        the policy keeps each group on one node."""
        nodes, groups = self.balance.num_nodes, self.router.num_groups
        require(
            self.group_size % nodes == 0,
            f"Balance.num_nodes={nodes} must divide the {self.group_size} devices of a "
            "group: use a divisor, or another Mesh or Dispatch.group",
        )
        require(
            self.balance.policy != "eplb" or groups % nodes == 0,
            f"Balance.num_nodes={nodes} must divide Router.num_groups={groups}: "
            "policy 'eplb' keeps each group of experts on one node",
        )

    def _check_rope(self) -> None:
        """Raise ValueError unless RoPE rotates whole pairs."""
        rotary_dim, share = self.network.rotary_dim, self.rope.partial_rotary_factor
        require(
            rotary_dim >= 2 and rotary_dim % 2 == 0,
            f"Rope.partial_rotary_factor={share} of Model.head_dim="
            f"{self.model.head_dim} is {rotary_dim} components: RoPE rotates pairs, so "
            "let the product be even and at least 2",
        )

    def _check_experts(self) -> None:
        """Raise ValueError for options of experts that do not go together."""
        moe = self.moe
        if moe.why_unfused is None:
            return
        value = getattr(moe, moe.why_unfused.removeprefix("Moe."))
        here = f"{moe.why_unfused}={value!r}"
        require(
            self.router.training == "sparse",
            f"{here} is for experts that compute rows, and Router.training='dense' has "
            "none: use 'sparse'",
        )
        if not moe.expert_bias:
            return
        require(
            self.dispatch.compression is None,
            f"{here} has biases, which are not compressed: use Dispatch.compression="
            f"None, not {self.dispatch.compression}",
        )
        parts = self.expert_shards * num_resting(self)
        require(
            self.model.d_model % parts == 0,
            f"{here} rests in {parts} parts: use a Model.d_model that they divide, not "
            f"{self.model.d_model}",
        )

    def _check_latent(self) -> None:
        """Raise ValueError for options that latent attention does not have."""
        model, here = self.model, f"Mla.kv_lora_rank={self.mla.kv_lora_rank}"
        require(
            model.num_kv_heads == model.num_heads,
            f"{here} gives each query head its own keys: set Model.num_kv_heads="
            f"{model.num_kv_heads} to num_heads={model.num_heads}",
        )
        default = Config()
        for part, field in (
            ("model", "qk_norm"), ("attention", "bias"), ("attention", "clip_qkv"),
            ("attention", "l2_norm"), ("attention", "sinks"),
            ("rope", "partial_rotary_factor"),
        ):  # fmt: skip
            value, off = (getattr(getattr(c, part), field) for c in (self, default))
            require(
                value == off,
                f"{part.title()}.{field}={value!r} is not for latent attention ({here})"
                f": set it to {off!r}",
            )

    def _check_cycle(self) -> None:
        """Raise ValueError unless kinds of attention fit the layers."""
        model, kinds, size = self.model, self.attention.layers, len(self.network.cycle)
        first = {kinds[i % len(kinds)] for i in range(model.first_k_dense)}
        require(
            len(first) < 2,
            f"Model.first_k_dense={model.first_k_dense} dense layers have several "
            f"kinds of attention by Attention.layers={kinds}: set first_k_dense to 0, "
            "and write the dense layers in Model.layers",
        )
        rest = model.num_layers - model.first_k_dense
        require(
            rest % size == 0,
            f"Model.num_layers={model.num_layers} minus first_k_dense="
            f"{model.first_k_dense} must be a multiple of {size}, in which the periods "
            f"of Attention.layers={kinds} and of MoE layers repeat together: write "
            "longer periods",
        )

    @property
    def expert_shards(self) -> int:
        """Number of parts into which the hidden width of each expert is cut."""
        return self.dispatch.expert_shards or self.mesh.tensor

    @property
    def group_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes along which the experts' owners lie."""
        return ("tensor",) if self.dispatch.is_local else self.dispatch.group_axes

    @property
    def group_size(self) -> int:
        """Number of owners of experts in a group.

        That is the number of devices along `group_axes`. Unless the schedule is
        'local', it is multiplied by the devices of the tensor axis and divided by the
        shards of an expert, since the shards of one expert have one owner together.
        """
        size = math.prod(getattr(self.mesh, axis) for axis in self.group_axes)
        if self.dispatch.is_local:
            return size
        return size * self.mesh.tensor // self.expert_shards

    @property
    def expert_widths(self) -> dict[str, int]:
        """Widths of an expert's parameters that are split where they rest, by name."""
        widths = {"Moe.d_expert": self.moe.d_expert}
        if self.moe.expert_bias:
            widths["Model.d_model"] = self.model.d_model
        return widths

    @property
    def network(self) -> Network:
        """The parts that a model is made of."""
        data = self.data
        return Network(
            self.model, self.moe, self.router, self.attention, self.rope, self.mla,
            data.documents, data.seq_len,
        )  # fmt: skip

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return all fields by part and name."""
        return dataclasses.asdict(self)


def num_resting(cfg: Config) -> int:
    """Return the number of devices over which a shard of an expert's width rests."""
    if cfg.dispatch.is_local:
        return cfg.mesh.data * cfg.mesh.expert
    return 1 if "data" in cfg.group_axes else cfg.mesh.data


def check_shards(cfg: Config) -> None:
    """Raise ValueError unless tensor axis, expert shards, schedule and domain fit
    together."""
    mesh, shards, d_expert = cfg.mesh, cfg.expert_shards, cfg.moe.d_expert
    schedule, group = cfg.dispatch.schedule, cfg.dispatch.group
    domain = cfg.dispatch.domain or (1, 1)
    if mesh.tensor > 1 or shards > 1 or schedule != "auto":
        name = UNSPLIT if schedule == "auto" else schedule
        inner = Tensor(name, mesh.tensor, shards).inner.get("expert", 1)
        require(
            mesh.expert % inner == 0,
            f"Dispatch.expert_shards={shards} with Mesh.tensor={mesh.tensor} cuts the "
            f"expert axis ({mesh.expert}) into parts of {inner} devices: use "
            f"Mesh.tensor times a divisor of {mesh.expert}",
        )
    resting = num_resting(cfg)
    data = f" x {resting} devices that hold parts of them (Mesh.data={mesh.data})"
    require(
        d_expert % (shards * resting) == 0,
        f"Moe.d_expert={d_expert} must be divisible by expert_shards={shards}"
        f"{data if resting > 1 else ''}: use a multiple of {shards * resting}",
    )
    require(
        not cfg.dispatch.is_local or (group == "expert" and domain in ((1, 1), "auto")),
        f"Dispatch.schedule='{schedule}' places experts along the tensor axis alone: "
        f"use Dispatch.group='expert' and Dispatch.domain=(1, 1), not '{group}' and "
        f"{domain}",
    )
    require(
        domain in ((1, 1), "auto") or group != "data_expert",
        f"Dispatch.domain={domain} has sizes along dc and expert: use "
        "Dispatch.group='dc_expert' or 'expert', not 'data_expert'",
    )
    if isinstance(domain, tuple):
        sizes = (mesh.dc if group == "dc_expert" else 1, mesh.expert)
        require(
            domain[0] < 1 or sizes[0] % domain[0] == 0,
            f"Dispatch.domain={domain} cuts the dc axis; set Dispatch.group = "
            f"'dc_expert' and Mesh.dc = {math.lcm(mesh.dc, max(domain[0], 1))} (they "
            f"are '{group}' and {mesh.dc}), or Dispatch.domain = {(1, domain[1])}",
        )
        require(
            domain[1] < 1 or sizes[1] % domain[1] == 0,
            f"Dispatch.domain={domain} must have a divisor of Mesh.expert="
            f"{mesh.expert} along expert: use "
            f"{(domain[0], math.gcd(mesh.expert, max(domain[1], 1)))}",
        )
        Domain(sizes, domain)
