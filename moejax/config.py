"""Configuration of a run: frozen dataclasses that check their own fields.

gin files bind these names (`Moe.top_k = 2`), and a `Config` holds one of each. A rule
within one class is checked when an object of it is made; a rule between two classes is
checked when the `Config` is made. This module needs the standard library only.

    Mesh                            devices (moejax.plan.layout.Topology)
    Model, Attention, Rope, Mla, Moe, Router
                                    the network: the parameters of a checkpoint
    Dispatch                        how the experts are computed
    Recorded                        loads that replace a router's choices
    Optimizer, Data, Train          how the network is trained
    Balance                         when experts move and are replicated
    Processes, Checkpoint           several processes, and recovery from failures
"""

import dataclasses
import math
from typing import Any, Literal, NamedTuple

from moejax.plan.layout import (
    GROUP_AXES,
    Fp8,
    Gather,
    Group,
    Kernels,
    Overflow,
    RowAlignment,
    Split,
    Store,
    Topology,
    uneven_group,
)
from moejax.plan.parallel import Domain, Form, Tensor
from moejax.plan.schedule_rules import SCHEDULES, UNSPLIT, Schedule


def require(claim: bool, message: str) -> None:
    """Raise ValueError with `message` unless `claim` holds."""
    if not claim:
        raise ValueError(message)


def require_min(instance: Any, minimum: float, *names: str) -> None:
    """Raise ValueError if one of these fields of `instance` is below `minimum`.

    A field that is None passes.
    """
    for name in names:
        value = getattr(instance, name)
        # gin binds the base class: an error in a subclass names the base too.
        part = type(instance).__mro__[-2].__name__
        rule = f"{part}.{name}={value} must be at least {minimum}"
        require(value is None or value >= minimum, rule)


def require_max(instance: Any, maximum: int, reason: str, *names: str) -> None:
    """Raise ValueError with the reason if one of these fields of `instance` is above
    `maximum`.

    A field that is None passes.
    """
    for name in names:
        value = getattr(instance, name)
        part = type(instance).__mro__[-2].__name__
        rule = f"{part}.{name}={value} must be at most {maximum}: {reason}"
        require(value is None or value <= maximum, rule)


def require_positive(instance: Any, *names: str) -> None:
    """Raise ValueError unless these fields of `instance` are above 0.

    A field that is None passes.
    """
    for name in names:
        value = getattr(instance, name)
        rule = f"{type(instance).__name__}.{name}={value} must be above 0"
        require(value is None or value > 0, rule)


MAX_INT32 = 2**31 - 1
MAX_WAIT_SEC = 10**7
MAX_WIDTH = 2**20
MAX_HEADS = 2**14
MAX_LAYERS = 2**12
MAX_EXPERTS = 2**13
MAX_SEED = 2**63 - 1
MAX_TABLE = 2**22
"""Largest number of entries of a table with one for each layer and expert, or for each
layer and slot. Processes send such tables to one another, and every device holds them.
"""
AXIS = "axes of arrays, and products of two, have fewer than 2**31 entries"
"""Reason for the largest widths."""
STEPS = "steps are counted in int32"


@dataclasses.dataclass(frozen=True)
class Model:
    """Shape of a decoder-only transformer with some Mixture-of-Experts (MoE) layers.

    Layer i is dense if i < first_k_dense. Each later layer is an MoE layer if
    (i - first_k_dense + 1) is a multiple of moe_every, else dense; or as `layers` says.
    """

    vocab_size: int = 256
    """Number of token ids."""
    d_model: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Number of transformer layers, dense and MoE layers together."""
    num_heads: int = 4
    """Number of query heads of attention."""
    num_kv_heads: int = 4
    """Number of key and value heads; it must divide num_heads."""
    head_dim: int = 32
    """Width of one attention head; it must be even."""
    d_ff: int = 512
    """Hidden width of the SwiGLU in dense layers."""
    first_k_dense: int = 0
    """Number of layers at the start that are dense."""
    moe_every: int = 1
    """Period of MoE layers after the first dense ones: with 1 every layer is MoE, with
    2 every other layer."""
    layers: tuple[Literal["dense", "moe"], ...] | None = None
    """Kinds of the layers of one period, which repeats after the first dense ones, in
    place of moe_every. None: moe_every - 1 dense layers, then an MoE layer."""
    block: Literal["standard", "shortcut"] = "standard"
    """Input of the routed experts: the residual stream after their layer's attention
    ('standard') or before it ('shortcut'). Shared experts always read it after
    attention (docs/blocks.md)."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm of queries and keys before RoPE: for each head ('head'), or over all
    heads together ('full', as in OLMoE)."""
    tie_embeddings: bool = True
    """Whether the output projection is the transpose of the token embedding."""
    rope_theta: float = 10_000.0
    """Base of the wavelengths of the rotary position embedding (RoPE)."""
    norm_eps: float = 1e-6
    """Number that RMSNorm adds to the mean square before the root."""
    embedding_multiplier: float = 1.0
    """Factor of the token embeddings that the first layer reads (Granite)."""
    residual_multiplier: float = 1.0
    """Factor of what attention and feed-forward parts add to the residual stream
    (Granite)."""
    logits_scaling: float = 1.0
    """Number by which logits are divided (Granite)."""
    attention: Literal["auto", "reference", "blocked", "cudnn", "hopper"] = "auto"
    """Implementation of attention over windows. 'auto': the one made for the device
    that takes the run's shapes (docs/kernels.md). One that is named and cannot compute
    them is refused at the start. With a cache, as in generation, it is always 'auto'.
    """
    remat: Literal["none", "dispatch", "full", "offload"] = "none"
    """Activations that a layer keeps for its backward pass: all of them ('none'), its
    input, routes and exchanged rows ('dispatch'), or input and routes alone ('full').
    The backward pass computes the rest again. 'offload' is 'full' with inputs in the
    host's memory (GPUs only)."""
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format of activations and matrix products; parameters are float32."""
    gradient_reduce_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Number format in which gradients of dense matrices and experts travel along data
    and expert, and in a domain, to where the weights rest; sums are float32. If
    compute_dtype is float32, so is this. Gradients of router, embedding and head always
    travel in float32, and those of an expert's copies in compute_dtype. Along dc, parts
    that are summed already are all-reduced in the dtype in which they rest."""
    from_hf: str | None = None
    """Folder of a published model that a new run starts from: its config.json decides
    the fields of Model, Attention, Rope, Mla, Moe and Router that it has a value for,
    and its tensors are the first parameters (docs/finetune.md). Its tokenizer.json is
    the default of Data.tokenizer. None: parameters start at random."""

    def __post_init__(self) -> None:
        require_min(
            self, 1, "vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads",
            "head_dim", "d_ff", "moe_every",
        )  # fmt: skip
        require_min(self, 0, "first_k_dense")
        for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
            require_positive(self, name)
        require_max(self, MAX_INT32, "token ids are int32", "vocab_size")
        require_max(self, MAX_WIDTH, AXIS, "d_model", "d_ff")
        require_max(self, MAX_HEADS, AXIS, "num_heads", "head_dim")
        require_max(self, MAX_LAYERS, "plans have a row for each layer", "num_layers")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"Model.num_heads={self.num_heads} must be a multiple of "
            f"num_kv_heads={self.num_kv_heads}",
        )
        require(
            self.head_dim % 2 == 0,
            f"Model.head_dim={self.head_dim} must be even: RoPE rotates pairs of "
            "components",
        )
        if self.layers is not None:
            self._check_period()
        require(
            self.num_moe_layers >= 1
            and (self.num_layers - self.first_k_dense) % self.moe_every == 0,
            f"Model.num_layers={self.num_layers} minus first_k_dense="
            f"{self.first_k_dense} must be a multiple of moe_every={self.moe_every}, "
            "and at least one such multiple: a model needs an MoE layer",
        )

    @property
    def repeats(self) -> Literal["none", "dispatch", "full"]:
        """The remat policy that computes the same again in the backward pass: 'full' in
        place of 'offload'."""
        return "full" if self.remat == "offload" else self.remat

    @property
    def period(self) -> tuple[Literal["dense", "moe"], ...]:
        """Kinds of the layers of one period, after the first dense ones."""
        return self.layers or ("dense",) * (self.moe_every - 1) + ("moe",)

    @property
    def num_moe_layers(self) -> int:
        """Number of MoE layers of the model."""
        periods = (self.num_layers - self.first_k_dense) // len(self.period)
        return periods * self.period.count("moe")

    def _check_period(self) -> None:
        require(
            "moe" in self.layers and self.moe_every == 1,
            f"Model.layers={self.layers} must have a layer 'moe', and takes the place "
            f"of moe_every={self.moe_every}: leave that at 1",
        )
        rest = self.num_layers - self.first_k_dense
        require(
            rest >= 1 and rest % len(self.layers) == 0,
            f"Model.num_layers={self.num_layers} minus first_k_dense="
            f"{self.first_k_dense} must be a multiple of the {len(self.layers)} layers "
            f"of Model.layers={self.layers}",
        )


@dataclasses.dataclass(frozen=True)
class Mla:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in place of
    grouped-query attention: keys and values come from one latent vector of a token.
    Model.head_dim is then not read."""

    kv_lora_rank: int | None = None
    """Width of the latent vector of keys and values. None: no latent attention."""
    q_lora_rank: int | None = None
    """Width of the latent vector of queries. None: queries are one product."""
    qk_nope_head_dim: int = 128
    """Width of the part of a query and key that RoPE does not rotate."""
    qk_rope_head_dim: int = 64
    """Width of the part that RoPE rotates; all heads share that of the key. It must be
    even."""
    v_head_dim: int = 128
    """Width of a value."""
    norm_eps: float = 1e-6
    """Number that the RMSNorms of the two latent vectors add to the mean square."""

    def __post_init__(self) -> None:
        sizes = (
            "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
            "v_head_dim",
        )  # fmt: skip
        require_min(self, 1, *sizes)
        require_max(self, MAX_WIDTH, AXIS, *sizes)
        require(
            self.qk_rope_head_dim % 2 == 0,
            f"Mla.qk_rope_head_dim={self.qk_rope_head_dim} must be even: RoPE rotates "
            "pairs of components",
        )
        require(
            self.q_lora_rank is None or self.kv_lora_rank is not None,
            f"Mla.q_lora_rank={self.q_lora_rank} is for latent attention, which is "
            "off: set Mla.kv_lora_rank",
        )


LayerAttention = Literal["full", "sliding", "chunked", "nope"]
"""Kind of attention of a layer: which earlier tokens of its document a token reads, and
whether RoPE rotates queries and keys. 'full': all of them; 'sliding': the last ones;
'chunked': those of its chunk of positions; 'nope': all, without RoPE."""


@dataclasses.dataclass(frozen=True)
class Attention:
    """Options of attention beside its shape. By default queries, keys and values are
    plain products, and each token reads all earlier ones of its document."""

    layers: tuple[LayerAttention, ...] = ("full",)
    """Kinds of attention of one period of layers, which repeats from the first layer
    on: all earlier tokens of the document ('full'), the last sliding_window of them
    ('sliding'), those of the same chunk ('chunked'), or all of them without RoPE
    ('nope')."""
    sliding_window: int | None = None
    """Number of tokens that a token of a 'sliding' layer reads, itself included."""
    chunk_size: int | None = None
    """Number of positions of a chunk in 'chunked' layers (Llama-4)."""
    temperature_scale: float = 0.0
    """Weight a of the query temperature in 'nope' layers: queries are multiplied by
    1 + a log(1 + floor((position + 1) / temperature_floor)) (Llama-4)."""
    temperature_floor: int = 8192
    """Number of positions between two steps of the query temperature."""
    bias: Literal["none", "qkv", "all"] = "none"
    """Products that have a bias: none, those that make queries, keys and values
    ('qkv', as in Qwen2 and GLM-4.5), or the output's too ('all', as in GPT-OSS)."""
    clip_qkv: float | None = None
    """Largest magnitude of queries, keys and values, to which they are clipped after
    QK-norm and before RoPE (OLMoE). None: no limit."""
    l2_norm: bool = False
    """Whether queries and keys are divided by their root mean square in each head after
    RoPE, without a learned scale, in layers that have RoPE (Llama-4)."""
    sinks: bool = False
    """Whether each head has a learned sink: a score without a value, which takes part
    in the softmax (GPT-OSS)."""
    scale: float | None = None
    """Factor of the products of queries and keys. None: 1 / sqrt(width of a query).
    Granite calls it attention_multiplier."""

    def __post_init__(self) -> None:
        require_positive(self, "clip_qkv", "scale")
        require_min(
            self, 1, "sliding_window", "chunk_size", "temperature_floor"
        )  # fmt: skip
        require_min(self, 0, "temperature_scale")
        require_max(
            self, MAX_INT32, "positions are int32", "sliding_window", "chunk_size",
            "temperature_floor",
        )  # fmt: skip
        require(len(self.layers) > 0, "Attention.layers=() names no layer: use 'full'")
        for field, kind, off in (
            ("sliding_window", "sliding", None),
            ("chunk_size", "chunked", None),
            ("temperature_scale", "nope", 0.0),
        ):
            value, is_there = getattr(self, field), kind in self.layers
            require(
                is_there or value == off,
                f"Attention.{field}={value} is for layers of kind {kind!r}, and "
                f"Attention.layers={self.layers} has none: set it to {off}",
            )
            require(
                not is_there or off is not None or value is not None,
                f"Attention.layers={self.layers} has layers of kind {kind!r}: set "
                f"Attention.{field}",
            )


@dataclasses.dataclass(frozen=True)
class Rope:
    """Scaling of the rotary position embedding (RoPE) for sequences that are longer
    than those of pre-training. Its base is Model.rope_theta."""

    scaling: Literal["none", "linear", "yarn", "llama3"] = "none"
    """How frequencies are changed. 'linear' divides all of them by `factor`; 'yarn'
    (Peng et al. 2023, arXiv 2309.00071) and 'llama3' divide low ones, keep high ones,
    and interpolate between."""
    factor: float = 1.0
    """Number by which frequencies are divided: the longest sequence over
    original_max_position_embeddings."""
    original_max_position_embeddings: int = 4096
    """Length of the sequences of pre-training, in tokens; for 'yarn' and 'llama3'."""
    beta_fast: float = 32.0
    """Rotations within the original length above which 'yarn' keeps a frequency."""
    beta_slow: float = 1.0
    """Rotations within the original length below which 'yarn' divides a frequency by
    `factor`."""
    truncate: bool = True
    """Whether 'yarn' rounds the two ends of its interpolation to whole pairs."""
    mscale: float = 0.0
    """Weight of the logarithm of `factor` in what 'yarn' multiplies cosine and sine by,
    m(mscale) / m(mscale_all_dim) where m(s) = 0.1 s ln(factor) + 1 (DeepSeek). 0 for
    one of them: m(1)."""
    mscale_all_dim: float = 0.0
    """The same in the divisor. Above 0, the softmax scale of 'yarn' is multiplied by
    m(mscale_all_dim)**2 (DeepSeek)."""
    low_freq_factor: float = 1.0
    """Rotations within the original length below which 'llama3' divides a frequency by
    `factor`."""
    high_freq_factor: float = 4.0
    """Rotations within the original length above which 'llama3' keeps a frequency."""
    partial_rotary_factor: float = 1.0
    """Share of a head's components that are rotated: the first ones (GLM-4.5)."""

    def __post_init__(self) -> None:
        require_min(self, 1, "factor", "original_max_position_embeddings")
        require_min(self, 0, "mscale", "mscale_all_dim")
        require_positive(self, "beta_slow", "low_freq_factor", "partial_rotary_factor")
        require_max(self, 1, "it is a share", "partial_rotary_factor")
        for low, high in (
            ("beta_slow", "beta_fast"), ("low_freq_factor", "high_freq_factor"),
        ):  # fmt: skip
            require(
                getattr(self, low) <= getattr(self, high),
                f"Rope.{low}={getattr(self, low)} must be at most "
                f"{high}={getattr(self, high)}: frequencies between are interpolated",
            )
        require(
            self.scaling != "none" or self.factor == 1,
            f"Rope.factor={self.factor} scales nothing, because Rope.scaling is "
            "'none': name a scaling, or set factor to 1",
        )

    def attention_factor(self) -> float:
        """Return the factor of cosine and sine."""
        if self.scaling != "yarn":
            return 1.0
        if self.mscale and self.mscale_all_dim:
            return self._m(self.mscale) / self._m(self.mscale_all_dim)
        return self._m(1.0)

    def softmax_factor(self) -> float:
        """Return the factor by which scaling changes the softmax scale."""
        return self._m(self.mscale_all_dim) ** 2 if self.scaling == "yarn" else 1.0

    def _m(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1


@dataclasses.dataclass(frozen=True)
class Moe:
    """Shape of the experts of an MoE layer. `Dispatch` says how they are computed."""

    num_experts: int = 8
    """Number of routed experts of each MoE layer."""
    top_k: int = 2
    """Number of experts that compute each token."""
    d_expert: int = 256
    """Hidden width f of the SwiGLU of one expert."""
    num_shared_experts: int = 0
    """Number of experts that compute every token, beside the routed ones. Together they
    are one dense SwiGLU of hidden width num_shared_experts * d_shared."""
    d_shared: int | None = None
    """Hidden width of the SwiGLU of one shared expert; None: d_expert."""
    shared_gate: bool = False
    """Whether the output of the shared experts is multiplied by the sigmoid of a
    learned product with their input (Qwen2-MoE)."""
    activation: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    """Function of a routed expert's two products, gate and up. 'swiglu': silu(gate) *
    up; 'clamped_swiglu': gate * sigmoid(swiglu_alpha * gate) * (up + 1), with gate at
    most swiglu_limit and up between -swiglu_limit and it (GPT-OSS)."""
    swiglu_limit: float = 7.0
    """Limit of 'clamped_swiglu'."""
    swiglu_alpha: float = 1.702
    """Factor in the sigmoid of 'clamped_swiglu'."""
    expert_bias: bool = False
    """Whether the three products of a routed expert have biases (GPT-OSS)."""
    halves: bool = False
    """Whether a device computes its tokens in two independent halves, so that the rows
    of one half travel while the other one is computed (docs/overlap.md). The function
    is the same."""

    def __post_init__(self) -> None:
        require_min(self, 1, "num_experts", "top_k", "d_expert")
        require_min(self, 0, "num_shared_experts")
        require_max(self, MAX_WIDTH, AXIS, "d_expert")
        require_max(
            self, MAX_EXPERTS, "every device has tables of all experts", "num_experts"
        )
        require_min(self, 1, "d_shared")
        require_max(self, MAX_WIDTH, AXIS, "d_shared")
        require_positive(self, "swiglu_limit", "swiglu_alpha")
        field = "d_expert" if self.d_shared is None else "d_shared"
        require(
            self.shared_width <= MAX_INT32,
            f"Moe.num_shared_experts={self.num_shared_experts} times {field}="
            f"{getattr(self, field)} is a width above {MAX_INT32}: use fewer",
        )
        require(
            self.num_shared_experts > 0 or not self.shared_gate,
            "Moe.shared_gate=True gates the shared experts, and Moe.num_shared_experts="
            "0: set it to False",
        )
        require(
            self.top_k <= self.num_experts,
            f"Moe.top_k={self.top_k} is more than num_experts={self.num_experts}",
        )

    @property
    def shared_width(self) -> int:
        """Hidden width of all shared experts together."""
        width = self.d_expert if self.d_shared is None else self.d_shared
        return self.num_shared_experts * width

    @property
    def why_unfused(self) -> str | None:
        """The option for which no fused kernel computes the experts' SwiGLU, or
        None."""
        if self.expert_bias:
            return "Moe.expert_bias"
        return None if self.activation == "swiglu" else "Moe.activation"


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """How rows reach experts, and how expert weights reach slots.

    A row is a token's activation on its way to one of its experts. A slot is room for
    the weights of one expert on a device. The defaults suit most runs: experts stay at
    their owners, every row arrives, and nothing is rounded.
    """

    exchange: Literal["exact", "capacity"] = "exact"
    """How rows beyond the buffers are treated. 'exact' carries every row, in as many
    rounds as that takes; 'capacity' drops and counts the rows that do not fit."""
    overflow: Overflow | None = None
    """How an exact step treats rows that round 0 of the exchange cannot carry.
    'rounds': later rounds carry them, in loops whose length only the devices know.
    'redo': the step has no such loops; where rows are left, it changes nothing, and the
    batch runs again with loops. None: 'redo' on GPUs, whose host waits at each loop,
    and 'rounds' on CPUs."""
    transport: Literal["padded", "ragged", "hierarchical"] = "padded"
    """How rows travel: an all_to_all of whole buffers ('padded'), of the filled rows
    alone ('ragged', GPUs only, and dangerous: docs/doctor.md), or of whole buffers over
    one mesh axis of the group after the other ('hierarchical')."""
    group: Group = "expert"
    """Devices between which rows travel. 'expert': those along the expert axis, with a
    group of its own for each index of data. 'data_expert': all of data x expert, so
    that the copies of experts that data parallelism holds anyway serve as replicas.
    'dc_expert': all of dc x expert, so that experts exist once over all data centres.
    """
    schedule: Literal["auto"] | Schedule = "auto"
    """Order of the collectives where there is a tensor axis (docs/communication.md).
    'auto' takes the schedule that is fastest by the speeds of Balance.calibration."""
    expert_shards: int | None = None
    """Number of parts into which the hidden width of each expert is cut. The parts lie
    along the tensor axis and, if there are more parts than it has devices, along part
    of the expert axis. None: as many parts as the tensor axis has devices."""
    domain: Literal["auto"] | tuple[int, int] = (1, 1)
    """Size of a domain along (dc, expert), in devices. The devices of a domain gather
    one another's experts, so that rows travel between domains only. 'auto' takes the
    domain that is fastest by the speeds of Balance.calibration."""
    compression: Form = "none"
    """How the experts that a domain gathers are compressed in training
    (docs/compression.md). 'none' sends whole weights. The other forms send the largest
    entries of a difference: 'residual' to the mean of all experts (HybridEP's own
    baseline), 'delta' to what the receivers hold already."""
    compression_ratio: float = 50.0
    """Target compression ratio of gathered experts: 50 sends 1/50 of the bytes."""
    gradient_compression: float | None = None
    """Target compression ratio of the gradients of gathered experts: 50 sends 1/50 of
    the bytes. The largest entries travel, once a step, and a device keeps the rest as a
    residual for the next step. None: gradients travel whole."""
    rows_per_peer: int | None = None
    """Number of rows that one device can send to one other in round 0 of the exchange;
    None: buffer_factor times the even share."""
    buffer_factor: float = 1.5
    """Size of the buffers of round 0 over the even share of rows, where rows_per_peer
    is None."""
    store: Store | None = None
    """How expert weights reach the slots (docs/balance.md), for the whole run. None:
    the run starts with the first store of Balance.policy, and the balancer may change
    to another one."""
    gather: Gather | None = None
    """When slots are gathered over data: in each layer of each micro-batch ('layer'),
    or once a step for all layers ('step', which takes memory: docs/balance.md). None:
    'step' on a GPU of known memory where that is less work and fits, else 'layer'."""
    slots_per_device: int | None = None
    """Number of slots of a device in each layer, at the start. None: one for each
    expert that the device owns, and one more where the policy replicates; groups of
    several axes and split='dynamic' get more (docs/balance.md)."""
    offers_per_device: int | None = None
    """Number of its own experts that a device can give to others as copies, at the
    start. None: 2 at most; all of them in groups of several axes and with
    split='dynamic'."""
    copies_per_device: int | None = None
    """Number of copies of others' experts that a device can hold, at the start. None:
    its slots beyond its own experts, or 1 if there are none."""
    split: Split | None = None
    """Rule by which a row goes to one replica of its expert (docs/balance.md); None:
    the split of Balance.policy. 'dynamic' makes the replicas too, for each micro-batch.
    """
    fused_split: bool = False
    """Whether split='water_filling' runs as one kernel; for Hopper GPUs."""
    kernels: Kernels = "auto"
    """Kernels of expert products and row permutations. 'auto': those made for the
    device, where there are some (docs/kernels.md); 'plain': XLA's operations alone."""
    fp8: Fp8 = "none"
    """8-bit format of the gradients that the experts' products multiply; their rows and
    weights are then rounded to e4m3 (docs/kernels.md). 'none': nothing is rounded."""
    align_rows: RowAlignment = 1
    """Divisor of the row at which the rows of each slot begin in training. 64 and 128
    put zero rows between slots, so that the Hopper kernels' tiles are whole; what that
    costs and saves is in docs/kernels.md. The function does not change."""
    prefetch: bool | None = None
    """Whether a layer's expert weights are fetched while the layer before computes:
    copies, slots of store='sharded', experts that a domain gathers, and what is
    gathered over data. None: with a domain, and on GPUs where data splits experts, yes;
    else as Balance.policy does."""

    def __post_init__(self) -> None:
        require_min(self, 1, "rows_per_peer", "slots_per_device", "expert_shards")
        require_min(self, 0, "offers_per_device", "copies_per_device")
        require_min(self, 1, "compression_ratio", "gradient_compression")
        for field, off in (("compression", "none"), ("gradient_compression", None)):
            value = getattr(self, field)
            require(
                value == off or self.domain != (1, 1),
                f"Dispatch.{field}={value!r} compresses experts that a domain gathers, "
                f"and Dispatch.domain is (1, 1), which gathers none: use a larger "
                f"domain or 'auto', or {field}={off!r}",
            )
        require(
            self.buffer_factor > 0,
            f"Dispatch.buffer_factor={self.buffer_factor} must be > 0",
        )

    @property
    def group_axes(self) -> tuple[str, ...]:
        """Names of the mesh axes of the group."""
        return GROUP_AXES[self.group]

    @property
    def is_local(self) -> bool:
        """Whether the schedule places experts along the tensor axis."""
        return self.schedule != "auto" and SCHEDULES[self.schedule].is_local


@dataclasses.dataclass(frozen=True)
class Router:
    """How the router assigns tokens to experts: scores, choice, gates and the auxiliary
    losses that even out the load.

    Each loss is averaged over layers and micro-batches, and then multiplied by its
    weight.
    """

    kind: Literal["softmax", "sigmoid", "expert_choice", "recorded"] = "softmax"
    """Kind of router. 'softmax' and 'sigmoid' name the function that turns logits into
    scores, by which each token chooses its top_k experts; 'expert_choice' lets experts
    choose tokens; 'recorded' draws choices that follow the loads of `Recorded`."""
    normalise_gates: bool = True
    """Whether the gates of a token's chosen experts are divided by their sum."""
    gate_scale: float = 1.0
    """Factor of all gates."""
    bias: bool = False
    """Whether the product that makes the logits has a learned bias (GPT-OSS)."""
    gate_input: bool = False
    """Whether a gate multiplies the input of its expert, and not the output
    (Llama-4)."""
    num_groups: int = 1
    """Number of equal groups of experts for a group-limited choice; 1 turns it off."""
    top_groups: int = 1
    """Number of groups that a token can choose from: those with its best scores."""
    jitter: float = 0.0
    """Half width of the noise that multiplies the router's input in training:
    uniform(1 - jitter, 1 + jitter)."""
    balance_loss: float = 0.01
    """Weight of Switch's load-balancing loss over the global batch."""
    sequence_balance_loss: float = 0.0
    """Weight of the load-balancing loss within each sequence (DeepSeek-V3)."""
    z_loss: float = 0.001
    """Weight of the router z-loss: the mean square of the logits' logsumexp."""
    mutual_information_loss: float = 0.0
    """Weight of a loss that is minus the mutual information of token and expert
    (DS-MoE). It rewards routers that are sure of few experts for each token and use
    all experts alike."""
    training: Literal["sparse", "dense"] = "sparse"
    """Experts that compute a token in training: its top_k ('sparse') or all of them
    ('dense'). Evaluation and generation always take the top_k (docs/blocks.md)."""
    bias_rate: float = 0.0
    """Amount by which each expert's bias changes per step, up for an expert below the
    mean load and down for one above it. The bias, DeepSeek-V3's correction bias, moves
    the choice and not the gates. 0 freezes it: at 0, or as a checkpoint has it."""
    allow_expert_choice_in_decoder: bool = False
    """Whether kind='expert_choice' is permitted, although its choices depend on later
    tokens of the sequence."""

    def __post_init__(self) -> None:
        require_min(
            self,
            0,
            "jitter",
            "balance_loss",
            "sequence_balance_loss",
            "z_loss",
            "mutual_information_loss",
            "bias_rate",
        )
        require_min(self, 1, "num_groups", "top_groups")
        require(
            self.top_groups <= self.num_groups,
            f"Router.top_groups={self.top_groups} exceeds num_groups={self.num_groups}",
        )
        require(
            self.bias_rate == 0 or self.kind in ("softmax", "sigmoid"),
            f"Router.bias_rate={self.bias_rate} steers tokens that choose by scores, "
            f"and kind is '{self.kind}': set it to 0",
        )
        require(
            self.training == "sparse" or self.kind in ("softmax", "sigmoid"),
            f"Router.training='dense' weights all experts by their scores, and kind is "
            f"'{self.kind}': use 'softmax' or 'sigmoid'",
        )
        require(
            not self.gate_input
            or (self.kind in ("softmax", "sigmoid") and self.training == "sparse"),
            f"Router.gate_input=True is for tokens that choose experts, and kind is "
            f"'{self.kind}', training '{self.training}': set it to False",
        )
        require(
            self.kind != "expert_choice" or self.allow_expert_choice_in_decoder,
            "Router.kind='expert_choice' lets a token's experts depend on later "
            "tokens, and this model is a causal decoder: set "
            "Router.allow_expert_choice_in_decoder = True if you mean it",
        )


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Expert loads that Router.kind='recorded' follows; benchmarks of skewed loads use
    them."""

    source: str = "zipf"
    """Name of a synthetic load ('uniform', 'zipf', 'one_hot', 'rotating', 'burst' or
    'wandering'), or the path of an .npz file of recorded loads."""
    zipf: float = 1.0
    """Exponent of source='zipf': expert i has load (i + 1) ** -zipf."""
    period_steps: int = 20
    """Period of a load that changes, in steps. 'rotating': time until the next expert
    becomes the hot one. 'burst': length of a phase with a hot expert, and of the even
    phase after it. 'wandering': time in which a hill of load rises, and in which it
    then moves on by one expert."""
    hot_share: float = 0.5
    """Share of all choices that the hot expert gets, 1/top_k at most; for 'rotating',
    'burst' and 'wandering'."""
    array: str = "tokens"
    """Name of the array in the .npz file that has the counts [samples, layers, ...,
    experts]; dims between layers and experts are summed."""
    steps_per_sample: int = 1
    """Number of training steps that follow one sample of the .npz file."""

    def __post_init__(self) -> None:
        require_min(self, 0, "zipf", "hot_share")
        require_max(self, 1, "it is a share", "hot_share")
        require_max(self, MAX_INT32, STEPS, "period_steps", "steps_per_sample")
        require_min(self, 1, "period_steps", "steps_per_sample")


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Settings of AdamW, and of the warm-up and decay of its learning rate."""

    learning_rate: float = 1e-3
    """Peak learning rate, at the end of the warm-up."""
    warmup_steps: int = 50
    """Number of steps in which the learning rate rises to its peak."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate from the end of the warm-up to the last step."""
    final_lr_ratio: float = 0.1
    """Learning rate of the last step over the peak; 'constant' ignores it."""
    b1: float = 0.9
    """Decay rate of Adam's first moment, per step."""
    b2: float = 0.95
    """Decay rate of Adam's second moment, per step."""
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format in which Adam's first moment rests; 'bfloat16' saves 2 bytes a
    parameter. The second moment and the update are float32
    (docs/decisions/0018-will-it-fit.md)."""
    eps: float = 1e-8
    """Number that Adam adds to the root of the second moment."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms, biases and embeddings have none."""
    clip_norm: float = 1.0
    """Largest global norm of the gradients, to which larger ones are scaled down; 0
    turns clipping off."""
    max_skipped_in_a_row: int = 10
    """Number of non-finite updates in a row after which the run stops. Fewer are
    skipped."""

    def __post_init__(self) -> None:
        require_min(
            self, 0, "learning_rate", "warmup_steps", "final_lr_ratio", "weight_decay",
            "clip_norm",
        )  # fmt: skip
        require_min(self, 1, "max_skipped_in_a_row")
        require_max(self, MAX_INT32, STEPS, "warmup_steps", "max_skipped_in_a_row")


@dataclasses.dataclass(frozen=True)
class Data:
    """Corpora, tokenizer and windows of the training data.

    A batch is a function of (corpus sha, seed, step).
    """

    corpus: str | tuple[str, ...] = "pysrc"
    """Corpus, or several that are mixed. A corpus is 'pysrc', the Python source of jax,
    flax, optax, orbax and grain, or a path or glob of .txt, .jsonl, .parquet, .npy or
    .bin files."""
    weights: tuple[float, ...] | None = None
    """Weight of each corpus in the batches; only their ratios count. None: the corpora
    are weighted by their sizes."""
    tokenizer: str = "bytes"
    """Tokenizer: 'bytes', or the path of a Hugging Face tokenizers file
    (tokenizer.json)."""
    separator: str | int | None = None
    """Token, or id of a token, that starts each document. None: 0x00 for bytes, else
    the tokenizer's end-of-text token."""
    text_key: str = "text"
    """Field of a JSONL record, or column of a parquet file, that holds the text."""
    documents: Literal["separate", "joined"] = "separate"
    """Whether attention and positions stop at the edges of documents ('separate') or
    cross them ('joined')."""
    seq_len: int = 256
    """Length of a training sequence, in tokens."""
    seed: int = 0
    """Seed of the order in which windows are drawn from the corpora."""
    held_out_every: int = 50
    """Hold out every N-th document. A corpus with fewer than N documents gives up the
    last 1/N of its tokens."""
    max_bad_records: int = 100
    """Largest number of records that cannot be read and are skipped; with more the
    program stops."""
    max_expansion: int = 200
    """Largest ratio of the text in a compressed file to the bytes of the file. At least
    64 MiB of text are always allowed."""
    log_samples: bool = False
    """Whether the ids of each step's windows are written to samples-<process>.jsonl."""

    def __post_init__(self) -> None:
        require_min(self, 2, "seq_len", "held_out_every")
        require_min(self, 0, "seed", "max_bad_records")
        require_min(self, 1, "max_expansion")
        require(
            self.weights is None or len(self.weights) == len(self.corpora),
            f"Data.weights={self.weights} must have one weight for each of "
            f"{len(self.corpora)} corpora",
        )
        require(
            self.weights is None or all(w > 0 for w in self.weights),
            f"Data.weights={self.weights} must all be above 0: leave a corpus out "
            "instead",
        )
        require(len(self.corpora) > 0, "Data.corpus=() names no data: name a corpus")

    @property
    def corpora(self) -> tuple[str, ...]:
        """Corpora as a tuple, also where there is only one."""
        return (self.corpus,) if isinstance(self.corpus, str) else self.corpus


@dataclasses.dataclass(frozen=True)
class Train:
    """Settings of the training loop: steps, batches, evaluations and logs."""

    num_steps: int = 100
    """Number of training steps."""
    batch_size: int = 32
    """Number of sequences per step, over all devices and micro-batches."""
    accumulate_steps: int = 1
    """Number of micro-batches per step, whose gradients are averaged."""
    seed: int = 0
    """Seed of the initial parameters and of the random numbers of the steps."""
    logit_z_loss: float = 0.0
    """Weight of the z-loss of the output logits: the mean square of their logsumexp."""
    loss_chunk: int = 256
    """Number of positions of a sequence whose logits exist at one time in the loss."""
    eval_every_steps: int = 100
    """Number of steps from one evaluation to the next."""
    eval_batches: int = 8
    """Number of held-out batches per evaluation, of batch_size sequences each; they are
    always the same."""
    log_load_every_steps: int = 10
    """Number of steps from one record of all experts' loads in metrics.jsonl to the
    next."""
    check_replicas_every_steps: int = 50
    """Number of steps from one comparison of replicated leaves to the next: parameters
    and other state that several devices hold must have equal bits on all of them. They
    are also compared before each save. 0: never."""
    run_dir: str | None = None
    """Directory of the run's files; None: runs/<name of the first gin file>."""
    num_simulated_devices: int | None = None
    """Number of devices to simulate on the CPU; None: the devices of this machine."""
    peak_tflops: float | None = None
    """Peak throughput of one device in TFLOP/s, for MFU (model FLOPs utilization).
    None: the value of a known GPU's data sheet, or of a measurement on a CPU."""

    def __post_init__(self) -> None:
        require_min(
            self, 1, "num_steps", "batch_size", "accumulate_steps", "loss_chunk",
            "eval_every_steps", "eval_batches", "log_load_every_steps",
            "num_simulated_devices",
        )  # fmt: skip
        require_min(self, 0, "check_replicas_every_steps")
        require_max(self, MAX_INT32, STEPS, "num_steps")
        require_max(self, MAX_SEED, "seeds have 64 bits", "seed")
        require_min(self, -MAX_SEED, "seed")
        require(
            self.batch_size % self.accumulate_steps == 0,
            f"Train.batch_size={self.batch_size} must be a multiple of "
            f"accumulate_steps={self.accumulate_steps}",
        )


@dataclasses.dataclass(frozen=True)
class Balance:
    """Settings of the balancer, which moves and replicates experts when their load is
    uneven (docs/balance.md).

    A swap adopts another plan: which expert each slot holds. A relayout adopts a step
    that is compiled for another layout. The imbalance of a layer is its device
    max/mean: the rows of its fullest device over the mean device's.
    """

    policy: str = "home"
    """Name of a policy in moejax.balance.policies; 'home' never moves an expert."""
    every_steps: int = 10
    """Number of steps from one decision to the next; decisions are taken at multiples
    of it."""
    lag_steps: int = 4
    """Number of steps from the decision for a swap to its adoption by all processes."""
    relayout_lag_steps: int = 50
    """Number of steps from the decision for a relayout to its adoption by all
    processes. They should take longer than the compilation."""
    act_above: float = 1.3
    """Forecast imbalance of the worst layer above which the balancer starts to seek
    changes."""
    rest_below: float = 1.1
    """Forecast imbalance of the worst layer below which the balancer stops seeking
    changes."""
    margin: float = 0.02
    """Smallest gain of a change, as a share of the time per step of the layers that it
    changes."""
    cooldown_steps: int = 20
    """Number of steps to wait: from a swap to the next swap, from any change to the
    next relayout, and from a decision that nothing pays to the next decision."""
    horizon_steps: int = 1000
    """Number of steps over which the gain of a change is summed and compared with its
    cost."""
    half_life_steps: float = 10.0
    """Half-life of the moving averages of loads, in steps."""
    max_slots_per_device: int | None = None
    """Largest number of slots per device that a relayout can give. None: twice the
    experts that a device owns and two more, or the slots at the start if these are
    more."""
    calibration: str | None = None
    """Path of a JSON file of measured speeds that tools/calibrate.py wrote. None:
    presumed speeds, 50 TFLOP/s and 12.5 GB/s."""

    def __post_init__(self) -> None:
        require_min(
            self, 1, "every_steps", "rest_below", "horizon_steps", "half_life_steps",
            "max_slots_per_device",
        )  # fmt: skip
        require_min(self, 2, "lag_steps")
        require_min(self, 0, "margin", "cooldown_steps")
        require(
            self.rest_below < self.act_above,
            f"Balance.rest_below={self.rest_below} must be below "
            f"act_above={self.act_above}: the balancer starts to act above act_above "
            "and stops below rest_below",
        )
        require(
            self.margin < 1,
            f"Balance.margin={self.margin} must be below 1: it is the share of its "
            "layers' time that a change must save",
        )
        require(
            self.relayout_lag_steps >= self.lag_steps,
            f"Balance.relayout_lag_steps={self.relayout_lag_steps} must be at least "
            f"lag_steps={self.lag_steps}: a relayout must be compiled before it is "
            "adopted",
        )


@dataclasses.dataclass(frozen=True)
class Processes:
    """Time limits of a run of several processes.

    The number of processes and their addresses are not configured here: the launcher
    passes them (docs/processes.md).
    """

    init_sec: int = 300
    """Longest time that processes wait for one another at the start, in seconds."""
    heartbeat_sec: int = 30
    """Silence of a process, in seconds, after which it counts as dead and all processes
    end."""
    shutdown_sec: int = 30
    """Longest time that processes wait for one another at the end, in seconds."""
    watchdog_sec: int = 300
    """Longest time of a step, an evaluation, or a save that writes nothing, in seconds.
    A process that takes longer prints the stack of each thread and ends; 0 means no
    limit. It is also the limit of checks at the start (docs/doctor.md)."""

    def __post_init__(self) -> None:
        require_min(self, 1, "init_sec", "heartbeat_sec", "shutdown_sec")
        require_min(self, 0, "watchdog_sec")
        require_max(
            self, MAX_WAIT_SEC, "timers count 115 days at most", "init_sec",
            "heartbeat_sec", "shutdown_sec", "watchdog_sec",
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When checkpoints are saved, and how many are kept."""

    every_steps: int = 100
    """Number of steps from one checkpoint to the next."""
    keep_last: int = 2
    """Number of newest checkpoints to keep."""
    keep_best: int = 1
    """Number of checkpoints with the lowest evaluation loss to keep."""
    max_failed_saves: int = 3
    """Number of failed saves in a row after which training stops; it goes on after
    fewer."""

    def __post_init__(self) -> None:
        require_min(self, 1, "every_steps", "keep_last", "max_failed_saves")
        require_min(self, 0, "keep_best")


class LayerKind(NamedTuple):
    """Static part of a layer: what decides its shapes and kernels."""

    is_moe: bool
    attention: LayerAttention


@dataclasses.dataclass(frozen=True)
class Network:
    """The parts of a configuration that `moejax.model` reads."""

    model: Model
    moe: Moe = Moe()
    router: Router = Router()
    attention: Attention = Attention()
    rope: Rope = Rope()
    mla: Mla = Mla()
    documents: Literal["separate", "joined"] = "separate"
    """Copy of Data.documents."""
    seq_len: int = 256
    """Copy of Data.seq_len: the length of a training sequence, in tokens."""

    @property
    def is_latent(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.mla.kv_lora_rank is not None

    @property
    def query_dim(self) -> int:
        """Width of a query and of a key."""
        if not self.is_latent:
            return self.model.head_dim
        return self.mla.qk_nope_head_dim + self.mla.qk_rope_head_dim

    @property
    def value_dim(self) -> int:
        """Width of a value."""
        return self.mla.v_head_dim if self.is_latent else self.model.head_dim

    @property
    def prefix_kind(self) -> LayerKind:
        """Kind of each of the first dense layers."""
        return LayerKind(False, self.attention.layers[0])

    @property
    def cycle(self) -> tuple[LayerKind, ...]:
        """Kinds of the layers that repeat after the first dense ones, as often as they
        fit: the shortest period of both MoE layers and kinds of attention."""
        period, kinds = self.model.period, self.attention.layers
        start = self.model.first_k_dense
        return tuple(
            LayerKind(period[i % len(period)] == "moe", kinds[(start + i) % len(kinds)])
            for i in range(math.lcm(len(period), len(kinds)))
        )

    @property
    def num_moe_in_cycle(self) -> int:
        """Number of MoE layers of a cycle."""
        return sum(kind.is_moe for kind in self.cycle)

    @property
    def num_cycles(self) -> int:
        """Number of cycles after the first dense layers."""
        return (self.model.num_layers - self.model.first_k_dense) // len(self.cycle)

    @property
    def rotary_dim(self) -> int:
        """Number of components of a head that RoPE rotates: the first ones, or the last
        ones of latent attention."""
        if self.is_latent:
            return self.mla.qk_rope_head_dim
        return int(self.model.head_dim * self.rope.partial_rotary_factor)


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
        self._check_experts()
        self._check_cycle()
        if self.network.is_latent:
            self._check_latent()
        rotary_dim, share = self.network.rotary_dim, self.rope.partial_rotary_factor
        require(
            rotary_dim >= 2 and rotary_dim % 2 == 0,
            f"Rope.partial_rotary_factor={share} of Model.head_dim="
            f"{self.model.head_dim} is {rotary_dim} components: RoPE rotates pairs, so "
            "let the product be even and at least 2",
        )
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
        for field, off in (("compression", "none"), ("gradient_compression", None)):
            value = getattr(self.dispatch, field)
            require(
                value == off,
                f"{here} has biases, which are not compressed: use Dispatch.{field}="
                f"{off!r}, not {value!r}",
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
    schedule, group, domain = (
        getattr(cfg.dispatch, name) for name in ("schedule", "group", "domain")
    )
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
        not cfg.dispatch.is_local or (group == "expert" and domain == (1, 1)),
        f"Dispatch.schedule='{schedule}' places experts along the tensor axis alone: "
        f"use Dispatch.group='expert' and Dispatch.domain=(1, 1), not '{group}' and "
        f"{domain}",
    )
    require(
        domain == (1, 1) or group != "data_expert",
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
