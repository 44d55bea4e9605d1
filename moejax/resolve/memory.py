"""Predicted memory of one device at the peak of a train step, by kind.

The prediction counts arrays; it compiles nothing. `tools/aot.py` compiles the step, and
says the same by the same kinds, but for the workspace of cuDNN's attention, which it
does not know. Everything rests (parameters, moments) or grows with the layers
(gradients, kept activations), or is of the part at work when the step peaks: one layer
in the backward pass, the loss, or the embedding.

    masters, moments   as they rest
    gradients          their sums over micro-batches, float32
    slots              weights as layers compute with them
    activations        what the forward pass keeps, and what the part at work needs
    exchange           rows that are sent, received, or put in order for it

Letters: n local tokens, d model width, m received rows, f expert hidden width on this
device, t time.
"""

import dataclasses

from moejax.config import Config
from moejax.model.flops import attention_matrices
from moejax.model.parameters import count, trains_experts
from moejax.plan.layout import Layout
from moejax.resolve.kernels import attention_arrays

FLOAT32 = 4
"""Bytes of a float32."""
ITEMSIZE = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by name of the dtype."""
KINDS = ("masters", "moments", "gradients", "slots", "activations", "exchange")
"""Kinds of a prediction, in the order of the tables."""


@dataclasses.dataclass(frozen=True)
class PartCounts:
    """Numbers of arrays that live at once where a part of the step peaks.

    They are counted in programs that XLA compiled for H100s (docs/aot.md), for the
    three GPU configurations; `tests/tools/compiled/test_goldens.py` compares others.
    """

    hidden: float
    """Arrays [n, d] of a layer."""
    rows: float
    """Arrays [m, d] of an exchange and of the experts."""
    expert_hidden: float
    """Arrays [m, f] of the experts."""


LAYER = PartCounts(hidden=2, rows=4, expert_hidden=5)
"""A layer in its backward pass, whose forward pass is computed again."""
UNFUSED = PartCounts(hidden=2, rows=8, expert_hidden=15)
"""The same where no kernel fuses the experts' activation (Moe.why_unfused). Counted in
two toys with biases and clamps, of widths 256 and 1024."""
KEPT = PartCounts(hidden=14, rows=3, expert_hidden=3)
"""A layer whose arrays are all kept for its backward pass (remat 'none')."""


def step_memory(
    cfg: Config, layout: Layout, held: dict[str, int], attention: str
) -> dict[str, int]:
    """Return the predicted bytes of one device at the peak of a train step, by kind.

    `held` are the bytes of its training state: 'params', 'trained' (those of parameters
    that are not frozen), 'moments', and, where experts travel compressed, 'tracked'.
    `attention` is the implementation of attention that
    the step takes (moejax.resolve.kernels).
    """
    sizes = _Sizes.of(cfg, layout, attention)
    parts = (
        _layer_at_work(cfg, sizes),
        _loss_at_work(cfg, sizes),
        _embedding_at_work(cfg, sizes),
    )
    at_work = max(parts, key=lambda part: sum(part.values()))
    gradients, slots = _of_all_layers(cfg, layout, sizes)
    fixed = {
        "masters": held["params"],
        "moments": held["moments"],
        "gradients": held["trained"] + gradients,
        "slots": slots + held.get("tracked", 0),
        "activations": _kept(cfg, sizes),
    }
    return {kind: round(fixed.get(kind, 0) + at_work.get(kind, 0)) for kind in KINDS}


def state_bytes(cfg: Config) -> dict[str, int]:
    """Return the bytes of one device of parameters and moments, as `step_memory` takes
    them, where no experts travel compressed.

    Small parameters, which rest whole, count as split.
    """
    found, parts = count(cfg.network, cfg.optimizer), _num_parts(cfg)
    first = found.trained * ITEMSIZE[cfg.optimizer.mu_dtype]
    second = found.trained * FLOAT32
    if cfg.optimizer.name == "muon":  # matrices have one average
        second -= found.matrices * FLOAT32
    return {
        "params": found.total // parts * FLOAT32,
        "trained": found.trained // parts * FLOAT32,
        "moments": (first + second) // parts,
    }


def _num_parts(cfg: Config) -> int:
    """Return the number of devices over which a parameter is split while it rests."""
    return cfg.mesh.data * cfg.mesh.expert * cfg.mesh.tensor


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Bytes of the arrays of one device that the parts of a step are made of."""

    hidden: int
    """Hidden states [n, d]."""
    row: int
    """Rows in the order in which experts compute them [m, d]."""
    received_row: int
    """Rows in the order in which they arrive [m, d]."""
    expert_hidden: int
    """Hidden states of the experts [m, f]."""
    slots: int
    """Slots of one layer, at work."""
    plan_slots: int
    """Those of the plan alone, without the copies of split 'top_up'."""
    dense: int
    """Weights of attention and of a dense feed-forward part, gathered."""
    dense_hidden: int
    """Hidden states of a dense feed-forward part [n, f]: shared experts or a dense
    layer."""
    heads: int
    """Queries, keys, values and the output of attention [n, heads, i]."""
    softmax_sums: int
    """Logarithms of the sums of attention's softmax, float32 [b, h, t]."""
    blocks: int
    """Queries, keys, values and the output's gradient, cut into blocks: 'blocked' makes
    a copy of them, and other implementations of attention read them as they are."""
    scores: int
    """Scores of attention in float32 [b, h, t, t], which 'reference' alone has."""
    workspace: int
    """Largest workspace of a call of 'cudnn'."""
    routes: int
    """Routing tables that a layer keeps: for each choice of a token a gate, a slot and
    the number of its row."""

    @classmethod
    def of(cls, cfg: Config, layout: Layout, attention: str) -> "_Sizes":
        model, moe, c = cfg.model, cfg.moe, ITEMSIZE[cfg.model.compute_dtype]
        t, d, tensor = cfg.data.seq_len, model.d_model, cfg.mesh.tensor
        b = cfg.train.batch_size // cfg.train.accumulate_steps
        b //= cfg.mesh.num_batch_shards
        view = layout.exchanged.topped_up
        shards = 1 if layout.is_local else cfg.expert_shards
        m = view.num_sorted_rows(view.rows_per_device)
        received = view.num_received_rows
        m *= view.num_exchanges  # those of one half are alive beside the other's
        received *= view.num_exchanges
        f = moe.d_expert // shards
        network, kv_heads = cfg.network, model.num_kv_heads
        widths = network.query_dim + network.value_dim
        has_dense = model.num_moe_layers < model.num_layers
        width = max(moe.shared_width, has_dense * model.d_ff)
        heads = b * t * widths * (model.num_heads + kv_heads) // tensor * c
        num_heads = model.num_heads // tensor
        return cls(
            hidden=b * t * d * c,
            row=m * d * c,
            received_row=received * d * c,
            expert_hidden=m * f * c,
            slots=view.slots_per_device * 3 * d * f * c,
            plan_slots=layout.exchanged.slots_per_device * 3 * d * f * c,
            dense=(attention_matrices(network) + 3 * d * width) // tensor * c,
            dense_hidden=b * t * width // tensor * c,
            heads=heads,
            softmax_sums=b * num_heads * t * FLOAT32,
            blocks=heads if attention == "blocked" else 0,
            scores=b * num_heads * t * t * FLOAT32 * (attention == "reference"),
            workspace=_workspace_bytes(cfg) if attention == "cudnn" else 0,
            routes=b * t * moe.top_k * 3 * FLOAT32,
        )


def _workspace_bytes(cfg: Config) -> int:
    """Return the bytes of the workspace of cuDNN's attention."""
    from moejax.kernels.attention.cudnn import workspace_bytes

    return workspace_bytes(attention_arrays(cfg))


def _layer_at_work(cfg: Config, sizes: _Sizes) -> dict[str, float]:
    """Return the bytes of one layer in its backward pass, by kind."""
    counts = LAYER if cfg.moe.why_unfused is None else UNFUSED
    return {
        "slots": sizes.slots + sizes.dense,
        "gradients": sizes.slots + sizes.dense,
        "activations": counts.hidden * sizes.hidden
        + counts.expert_hidden * sizes.expert_hidden
        + LAYER.expert_hidden * sizes.dense_hidden
        + sizes.heads
        + sizes.softmax_sums
        + sizes.blocks
        + sizes.workspace
        + 3 * sizes.scores,
        "exchange": counts.rows * sizes.row,
    }


def _loss_at_work(cfg: Config, sizes: _Sizes) -> dict[str, float]:
    """Return the bytes of the loss, by kind: a chunk's logits, its hidden states on
    their way, and the slice of the head with its gradient."""
    model, shards = cfg.model, cfg.mesh.expert * cfg.mesh.tensor
    c = ITEMSIZE[model.compute_dtype]
    slice_size = -(-model.vocab_size // shards)
    n = sizes.hidden // (model.d_model * c) * cfg.mesh.expert
    chunk = n * min(cfg.train.loss_chunk, cfg.data.seq_len) // cfg.data.seq_len
    travelling = 3 * chunk * model.d_model * c + sizes.hidden
    return {
        "slots": slice_size * model.d_model * (c + FLOAT32),
        "activations": chunk * slice_size * FLOAT32 + travelling,
    }


def _embedding_at_work(cfg: Config, sizes: _Sizes) -> dict[str, float]:
    """Return the bytes of the embedding, by kind: hidden states of the group's tokens,
    and the slice of the table with its gradient."""
    model, c = cfg.model, ITEMSIZE[cfg.model.compute_dtype]
    slice_size = -(-model.vocab_size // (cfg.mesh.expert * cfg.mesh.tensor))
    return {
        "slots": slice_size * model.d_model * (c + FLOAT32),
        "activations": 2 * sizes.hidden * cfg.mesh.expert,
    }


def _of_all_layers(cfg: Config, layout: Layout, sizes: _Sizes) -> tuple[int, int]:
    """Return the bytes of gradients and the bytes of slots that all layers have at
    once, beyond those of the layer at work and of the parameters' gradients.

    Both are 0 where each layer makes and frees its own. Sums of slots' gradients take
    the place of those of experts' parameters.
    """
    slots = cfg.model.num_moe_layers * sizes.plan_slots
    if layout.gather == "layer" and "data" not in layout.axes:
        slots //= cfg.mesh.data  # the hidden width is still split
    sums = round(slots * FLOAT32 / ITEMSIZE[cfg.model.compute_dtype])
    domain = layout.domain
    if layout.keeps_slots and trains_experts(cfg.network, cfg.optimizer):
        experts = 3 * cfg.model.d_model * cfg.moe.d_expert * cfg.moe.num_experts
        experts *= cfg.model.num_moe_layers
        return sums - experts * FLOAT32 // _num_parts(cfg), slots
    if layout.keeps_slots:
        return 0, slots
    if layout.prefetch and cfg.model.remat != "none":
        return sizes.slots, sizes.slots  # of the layers before and after
    if domain is not None and layout.prefetch:
        return 0, slots
    return 0, 0


def _kept(cfg: Config, sizes: _Sizes) -> float:
    """Return the bytes that the forward pass keeps for the backward pass."""
    num_layers, num_moe = cfg.model.num_layers, cfg.model.num_moe_layers
    num_inputs = min(num_layers, 1) if cfg.model.remat == "offload" else num_layers
    kept = num_inputs * sizes.hidden + num_moe * sizes.routes
    if cfg.model.remat == "dispatch":
        kept += num_moe * (sizes.received_row + sizes.row)  # to experts, and results
    if cfg.model.remat == "none":
        kept += num_layers * (KEPT.hidden * sizes.hidden + sizes.heads)
        kept += num_layers * (sizes.softmax_sums + sizes.scores)
        kept += num_layers * KEPT.expert_hidden * sizes.dense_hidden
        kept += num_moe * KEPT.rows * sizes.row
        kept += num_moe * KEPT.expert_hidden * sizes.expert_hidden
    return kept
