"""What the network is: model, experts, router; moejax.config names them all."""

import dataclasses
from typing import Any, Literal

from moejax.plan.domain import Domain, Form
from moejax.plan.layout import GROUP_AXES, Fp8, Group, Kernels, Split, Store
from moejax.plan.tensor import Schedule, Tensor


def require(claim: bool, message: str) -> None:
    if not claim:
        raise ValueError(message)


def at_least(instance: Any, least: float, *names: str) -> None:
    for name in names:
        value = getattr(instance, name)
        rule = f"{type(instance).__name__}.{name}={value} must be at least {least}"
        require(value is None or value >= least, rule)


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder-only transformer. Layer i is dense when i < first_k_dense, else it is
    MoE when (i - first_k_dense + 1) is a multiple of moe_every."""

    vocab_size: int = 256
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32
    d_ff: int = 512
    """Hidden width of the SwiGLU in dense layers."""
    first_k_dense: int = 0
    moe_every: int = 1
    block: Literal["standard", "shortcut"] = "standard"
    """Shortcut: routed experts read the input of their layer's attention, and shared
    ones its output (docs/blocks.md)."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys before RoPE: per head, or over all heads (OLMoE)."""
    tie_embeddings: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    attention: Literal["xla", "cudnn"] = "xla"
    """Implementation of jax.nn.dot_product_attention; cudnn is fused, on GPUs."""
    remat: Literal["none", "dispatch", "full"] = "none"
    """What a layer keeps for its backward pass: everything; its routes and exchanged
    rows; its routes alone."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self) -> None:
        at_least(
            self, 1, "vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads",
            "head_dim", "d_ff", "moe_every",
        )  # fmt: skip
        at_least(self, 0, "first_k_dense")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"Model.num_heads={self.num_heads} must be a multiple of "
            f"num_kv_heads={self.num_kv_heads}",
        )
        require(
            self.head_dim % 2 == 0,
            f"Model.head_dim={self.head_dim} must be even: RoPE turns pairs",
        )
        require(
            self.num_moe_layers >= 1
            and (self.num_layers - self.first_k_dense) % self.moe_every == 0,
            f"Model.num_layers={self.num_layers} minus first_k_dense="
            f"{self.first_k_dense} must be a multiple of moe_every={self.moe_every}, "
            "and at least one such multiple: a model needs an MoE layer",
        )

    @property
    def num_moe_layers(self) -> int:
        return (self.num_layers - self.first_k_dense) // self.moe_every


@dataclasses.dataclass(frozen=True)
class Moe:
    """Experts and how rows reach them."""

    num_experts: int = 8
    top_k: int = 2
    d_expert: int = 256
    """Hidden width f of one expert."""
    num_shared_experts: int = 0
    """Every token passes a dense SwiGLU of width num_shared_experts * d_expert too."""
    exchange: Literal["exact", "capacity"] = "exact"
    """Exact carries every row, in as many rounds as it takes; capacity drops some."""
    transport: Literal["padded", "ragged", "hierarchical"] = "padded"
    """all_to_all of whole buffers; of their rows alone (GPUs); and over one mesh axis
    of the group after the other."""
    group: Group = "expert"
    """Devices between which rows travel: those of one expert axis, each index of data a
    group of its own; or all of data x expert, so that the copies of experts that data
    parallelism holds anyway are replicas; or all of dc x expert: experts exist once
    over all data centres."""
    schedule: Literal["auto"] | Schedule = "auto"
    """Order of collectives where there is a tensor axis (docs/wires.md); 'auto' takes
    what Balance.calibration makes fastest."""
    expert_shards: int | None = None
    """Parts of one expert's hidden width, over the tensor axis and, if that has fewer
    devices, part of the expert axis; None: as many as the tensor axis has devices."""
    domain: Literal["auto"] | tuple[int, int] = (1, 1)
    """Devices along (dc, expert) that gather one another's experts, so that rows travel
    between such domains only; 'auto' takes what Balance.calibration makes fastest."""
    compression: Form = "none"
    """How gathered experts travel: whole, or in training as the largest entries of
    their difference to the experts' mean (residual, HybridEP's own baseline), or to
    what the others hold already (delta). docs/compression.md."""
    compression_ratio: float = 50.0
    """So many times fewer bytes."""
    gradient_compression: float | None = None
    """So many times fewer bytes for their gradients too: the largest entries travel,
    once a step, and a device keeps the rest for the next one. None: whole."""
    rows_per_peer: int | None = None
    """Rows that one device sends to one other in round 0; None derives it from
    buffer_factor times the even share."""
    buffer_factor: float = 1.5
    store: Store | None = None
    """How expert weights reach the slots (docs/balance.md), for the whole run; None:
    as Balance.policy is made for, and the balancer may choose another one."""
    slots_per_device: int | None = None
    """None: the experts that a device owns, and one where the policy replicates."""
    offers_per_device: int | None = None
    """Own experts that a device can give to others as copies; None: 2 at most."""
    copies_per_device: int | None = None
    """Copies that a device can hold; None: its slots beyond its own experts, or 1."""
    split: Split | None = None
    """Which replica a row goes to; None: as the policy reckons. 'dynamic' makes the
    replicas too, for each micro-batch."""
    fused_split: bool = False
    """Water-filling as one kernel, on Hopper GPUs."""
    kernels: Kernels = "auto"
    """The device's own, where it has some (docs/kernels.md), or XLA's alone (plain)."""
    fp8: Fp8 = "none"
    """Experts multiply 8-bit values, gradients in this format (docs/kernels.md)."""
    prefetch: bool | None = None
    """Transient copies travel a layer ahead; None: as the policy reckons."""

    def __post_init__(self) -> None:
        at_least(
            self, 1, "num_experts", "top_k", "d_expert", "rows_per_peer",
            "slots_per_device", "expert_shards",
        )  # fmt: skip
        at_least(
            self, 0, "num_shared_experts", "offers_per_device", "copies_per_device",
        )  # fmt: skip
        require(
            self.top_k <= self.num_experts,
            f"Moe.top_k={self.top_k} is more than num_experts={self.num_experts}",
        )
        at_least(self, 1, "compression_ratio", "gradient_compression")
        for field, off in (("compression", "none"), ("gradient_compression", None)):
            value = getattr(self, field)
            require(
                value == off or self.domain != (1, 1),
                f"Moe.{field}={value!r} is of experts that a domain gathers, and "
                f"Moe.domain is (1, 1): use 'auto', a larger domain, or {off!r}",
            )
        require(
            self.buffer_factor > 0,
            f"Moe.buffer_factor={self.buffer_factor} must be > 0",
        )

    @property
    def group_axes(self) -> tuple[str, ...]:
        """Mesh axes of the group."""
        return GROUP_AXES[self.group]


@dataclasses.dataclass(frozen=True)
class Router:
    """Who computes a token: scores, choice, gates and the losses that even the load.

    Losses are averaged over layers and micro-batches before their weight."""

    kind: Literal["softmax", "sigmoid", "expert_choice", "recorded"] = "softmax"
    normalise_gates: bool = True
    """Divide the chosen gates by their sum."""
    gate_scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    """Group-limited choice: only a token's best top_groups groups qualify."""
    jitter: float = 0.0
    """Training only: router input times uniform(1 - jitter, 1 + jitter)."""
    balance_loss: float = 0.01
    """Weight of Switch's load-balancing loss over the global batch."""
    sequence_balance_loss: float = 0.0
    """Weight of the same loss within each sequence (DeepSeek-V3)."""
    z_loss: float = 0.001
    mutual_information_loss: float = 0.0
    """Weight of minus the mutual information of token and expert: of few sure experts
    for each token and many for all (DS-MoE)."""
    training: Literal["sparse", "dense"] = "sparse"
    """Dense: in training every expert computes every token; evaluation and generation
    take the best top_k (docs/blocks.md)."""
    bias_rate: float = 0.0
    """Sigmoid: the expert bias moves by this much against the load each step."""
    allow_expert_choice_in_decoder: bool = False
    """Expert choice sees the future of the sequence that it routes."""

    def __post_init__(self) -> None:
        at_least(
            self,
            0,
            "jitter",
            "balance_loss",
            "sequence_balance_loss",
            "z_loss",
            "mutual_information_loss",
            "bias_rate",
        )
        at_least(self, 1, "num_groups", "top_groups")
        require(
            self.top_groups <= self.num_groups,
            f"Router.top_groups={self.top_groups} exceeds num_groups={self.num_groups}",
        )
        require(
            self.bias_rate == 0 or self.kind == "sigmoid",
            f"Router.bias_rate={self.bias_rate} steers kind='sigmoid' only, and kind "
            f"is '{self.kind}': set it to 0",
        )
        require(
            self.training == "sparse" or self.kind in ("softmax", "sigmoid"),
            f"Router.training='dense' weighs all experts by their scores, and kind is "
            f"'{self.kind}': use 'softmax' or 'sigmoid'",
        )
        require(
            self.kind != "expert_choice" or self.allow_expert_choice_in_decoder,
            "Router.kind='expert_choice' lets a token's experts depend on later "
            "tokens, and this model is a causal decoder: set "
            "Router.allow_expert_choice_in_decoder = True if you mean it",
        )


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Loads that Router.kind='recorded' follows; benchmarks of skew use it."""

    source: str = "zipf"
    """'uniform', 'zipf', 'one_hot', 'rotating', 'burst', 'wandering', or the path of an
    .npz."""
    zipf: float = 1.0
    """Exponent: expert i has load (i + 1) ** -zipf."""
    period_steps: int = 20
    """rotating: the hot expert moves on after so many steps; burst: one hot phase and
    one even phase of so many steps each; wandering: a hill rises in so many steps, then
    moves by one expert in so many."""
    hot_share: float = 0.5
    """rotating, burst, wandering: share of all choices that the hot expert gets (at
    most 1/k)."""
    array: str = "tokens"
    """.npz: name of the counts, [samples, layers, ..., experts]; the dims between are
    summed."""
    steps_per_sample: int = 1
    """.npz: steps before the next sample."""

    def __post_init__(self) -> None:
        at_least(self, 0, "zipf", "hot_share")
        at_least(self, 1, "period_steps", "steps_per_sample")


def check_shards(moe: Moe, mesh: Any, shards: int) -> None:
    """Tensor axis, expert shards, schedule and domain go together; `mesh` has sizes of
    its axes."""
    if mesh.tensor > 1 or shards > 1 or moe.schedule != "auto":
        schedule = "s1h" if moe.schedule == "auto" else moe.schedule
        inner = Tensor(schedule, mesh.tensor, shards).inner.get("expert", 1)
        require(
            mesh.expert % inner == 0,
            f"Moe.expert_shards={shards} takes {inner} devices of the expert axis "
            f"({mesh.expert}) for each of tensor={mesh.tensor}: use a divisor",
        )
        require(
            moe.d_expert % shards == 0,
            f"Moe.d_expert={moe.d_expert} must be divisible by expert_shards={shards}",
        )
    require(
        moe.schedule != "local" or (moe.group == "expert" and moe.domain == (1, 1)),
        "Moe.schedule='local' has the experts along the tensor axis alone: use "
        f"Moe.group='expert' and Moe.domain=(1, 1), not '{moe.group}' and {moe.domain}",
    )
    require(
        moe.domain == (1, 1) or moe.group != "data_expert",
        f"Moe.domain={moe.domain} has sizes along dc and expert: use "
        "Moe.group='dc_expert' or 'expert', not 'data_expert'",
    )
    if isinstance(moe.domain, tuple):
        Domain((mesh.dc if moe.group == "dc_expert" else 1, mesh.expert), moe.domain)
