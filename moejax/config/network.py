"""Configuration of the network: its shape, its experts and its router."""

import dataclasses
import math
from typing import Literal, NamedTuple

from moejax.config.attention import Attention, LayerAttention, Mla, Rope
from moejax.config.checks import (
    AXIS,
    MAX_HEADS,
    MAX_INT32,
    MAX_LAYERS,
    MAX_WIDTH,
    require,
    require_max,
    require_min,
    require_positive,
)
from moejax.plan.groups import MAX_EXPERTS


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
    attention: Literal["auto", "reference", "blocked", "cudnn"] = "auto"
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
        require(
            self.rope_theta > 1,
            f"Model.rope_theta={self.rope_theta} must be above 1: wavelengths are its "
            "powers, and grow from pair to pair",
        )
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
        rest = self.num_layers - self.first_k_dense
        if self.layers is None:
            return rest // self.moe_every
        return rest // len(self.layers) * self.layers.count("moe")

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
class Router:
    """How the router assigns tokens to experts: scores, choice, gates and the auxiliary
    losses that even out the load.

    Each loss is averaged over layers and micro-batches, and then multiplied by its
    weight.
    """

    kind: Literal["softmax", "sigmoid", "recorded"] = "softmax"
    """Kind of router. 'softmax' and 'sigmoid' name the function that turns logits into
    scores, by which each token chooses its top_k experts; 'recorded' draws choices that
    follow the loads of `Recorded`."""
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

    def __post_init__(self) -> None:
        require(
            self.model.block == "standard" or self.moe.num_shared_experts > 0,
            f"Model.block='{self.model.block}' needs shared experts to read the output "
            "of attention, but Moe.num_shared_experts=0: use 1 or more",
        )

    def check_tensor(self, tensor: int) -> None:
        """Raise ValueError unless a tensor axis of `tensor` devices can split the heads
        of attention and the hidden widths of dense layers and shared experts.

        The number of query heads is a multiple of that of key-value heads.
        """
        model, moe = self.model, self.moe
        sizes = {"Model.num_kv_heads": model.num_kv_heads}
        if model.num_moe_layers < model.num_layers:
            sizes["Model.d_ff"] = model.d_ff
        if moe.num_shared_experts:
            field = "d_expert" if moe.d_shared is None else "d_shared"
            sizes[f"Moe.num_shared_experts * {field}"] = moe.shared_width
        for name, size in sizes.items():
            require(
                size % tensor == 0,
                f"{name}={size} must be divisible by Mesh.tensor={tensor}: use "
                f"{-(-size // tensor) * tensor}, or Mesh.tensor = "
                f"{math.gcd(size, tensor)}",
            )

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
        """Kinds of the layers of one cycle, which repeats after the first dense layers:
        the shortest period of both MoE layers and kinds of attention."""
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
