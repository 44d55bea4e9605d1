"""Configuration of attention: its options, rotary embedding, latent attention."""

import dataclasses
import math
from typing import Literal

from moejax.config.checks import (
    AXIS,
    MAX_INT32,
    MAX_WIDTH,
    require,
    require_max,
    require_min,
    require_positive,
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
