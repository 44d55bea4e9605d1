"""Attention by cuDNN's kernel for packed documents, on NVIDIA GPUs ('cudnn').

cuDNN calls it the ragged or THD layout. A row of the batch is one buffer of tokens, and
two tables say where each of its documents begins and how long it is. The kernel visits
one document after another, so other documents' keys are never read, and no mask is
made.

    first_t   0 0 0 3 3 5 5 5        places for M = 4 documents in a row of t = 8 tokens
    offset    0 3 5 8 8              where a document begins; t for one that is absent
    length    3 2 3 0

JAX has this layout in a private module only, jax._src.cudnn.fused_attention_stablehlo.
No other file of moejax uses it, and a test names the version of JAX for which it was
read. Its two primitives are bound here, not its differentiable function, so that the
backward pass gets a logarithm that knows sinks. They are XLA's custom calls, which XLA
cannot split over devices: under a mesh, call attention inside shard_map, where each
device has its own rows. cuDNN returns the natural logarithm of the sum of exp(scaled
score) in float32, for each place of a document in an array [M, h, t], of which document
m fills the first length[m] columns.

Memory sets M. XLA does not tell cuDNN how many tokens all documents have together
(max_total_seq_len of NVIDIA/cudnn-frontend). So in the backward pass cuDNN sums the
gradient of queries, in float32, in a workspace that has the size of the whole row for
each of the M documents, and does alike for keys and values of grouped heads.
`max_documents` keeps the workspace within WORKSPACE_BYTES, and one row is computed
after another. With 32 heads in groups, 128 wide, there is room for 32 documents in a
row of 4096 tokens and for 4 in one of 32768. Where a row has more, the batch is
computed in blocks (portable.py): a conditional in the same program.

Grouped heads need a version of JAX after its pull request 39521 or tables of one's own,
as here: before, JAX gave the keys' documents the offsets of the queries.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jaxtyping import Array, Bool, Float, Int

from moejax.kernels.attention import portable
from moejax.kernels.attention.reading import Inputs, Rule, scale
from moejax.kernels.device import device_here

MAX_DOCUMENTS = 64
"""Largest M. cuDNN starts blocks of threads for t queries of each document, and those
past its end have nothing to do."""
WORKSPACE_BYTES = 4 * 2**30
"""Largest workspace of a backward call. It is in use while one layer is computed."""
MAX_WIDTH = 128
"""Largest width of a head whose gradient cuDNN computes on all GPUs."""
MIN_VERSION = 90600
"""cuDNN's first version with packed documents and grouped heads, 9.6."""
WRONG_VERSIONS = (91000, 91001)
"""Versions of cuDNN whose attention in 16 bits is wrong (sdpa_support_surface.h in
NVIDIA/cudnn-frontend)."""


def declines(inputs: Inputs, rule: Rule) -> str | None:
    """Return the reason why cuDNN does not take these arrays on the current device, or
    None.

    Only shapes and dtypes are read, and the device if it is here.
    """
    if device_here().platform != "gpu":
        return f"it is for NVIDIA GPUs, not {device_here().device_kind}"
    why = _why_not_arrays(inputs, rule)
    return _why_not_here(inputs) if why is None and is_here() else why


def _why_not_arrays(inputs: Inputs, rule: Rule) -> str | None:
    """Return the reason why cuDNN has no attention of these arrays, or None.

    As many keys as queries are whole windows: a cache with room for them alone begins
    with them.
    """
    (_, t, h, i), j = inputs.q_bthi.shape, inputs.v_bugj.shape[3]
    dtypes = {array.dtype.name for array in inputs[:3]}
    if dtypes not in ({"bfloat16"}, {"float16"}):
        return f"it takes bfloat16 or float16, not {' and '.join(sorted(dtypes))}"
    if rule.soft_cap is not None:
        return "it has no soft cap of scores"
    if inputs.k_bugi.shape[1] != t:
        return f"{t} queries and {inputs.k_bugi.shape[1]} keys are no whole windows"
    if i != j or i > MAX_WIDTH or i % 8:
        widths = f"queries {i} wide and values {j} wide"
        return f"{widths}: both must be one multiple of 8 up to {MAX_WIDTH}"
    if max_documents(inputs) < 2:
        size = 2 * _document_bytes(inputs) / 2**30
        return f"two documents of {t} tokens and {h} heads need {size:.1f} GiB"
    return None


def is_here() -> bool:
    """Return whether this machine has a GPU of the kind that programs are compiled for,
    so that it can be asked."""
    first = jax.local_devices()[0]
    return first.platform == "gpu" and first.device_kind == device_here().device_kind


def max_documents(inputs: Inputs) -> int:
    """Return the number of documents of a row for which a call has places."""
    return min(MAX_DOCUMENTS, WORKSPACE_BYTES // _document_bytes(inputs))


def workspace_bytes(inputs: Inputs) -> int:
    """Return the bytes of a backward call's workspace, which serves one row."""
    return max_documents(inputs) * _document_bytes(inputs)


def forward(
    inputs: Inputs, rule: Rule
) -> tuple[Float[Array, "b t h j"], Float[Array, "b h t"]]:
    """Return the output, and the logarithm of the softmax's sum (reference.py)."""
    _raise_if_declined(inputs, rule)

    def of_row(arrays):
        row = Inputs(*arrays, inputs.start)
        documents = documents_of(row)
        operands = _operands(row, documents.begin_n)
        out_1thj, stat_mht = fused._dot_product_attention_fwd_p.bind(
            *operands, **_options(row, rule), is_training=True
        )
        return out_1thj[0], join(stat_mht, documents)

    return jax.lax.cond(
        _has_few_documents(inputs),
        lambda: jax.lax.map(of_row, _rows(*inputs[:4])),
        lambda: portable.forward(inputs, rule),
    )


def backward(
    inputs: Inputs,
    rule: Rule,
    out_bthj: Float[Array, "b t h j"],
    lse_bht: Float[Array, "b h t"],
    dout_bthj: Float[Array, "b t h j"],
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, keys and values."""
    _raise_if_declined(inputs, rule)

    def of_row(arrays):
        *arrays, out_1thj, lse_1ht, dout_1thj = arrays
        row = Inputs(*arrays, inputs.start)
        documents = documents_of(row)
        operands = _operands(row, documents.begin_n)
        stat_mht = cut(lse_1ht[0], documents)
        gradients = fused._dot_product_attention_bwd_p.bind(
            *operands, stat_mht, out_1thj, dout_1thj, **_options(row, rule)
        )
        return tuple(gradient[0] for gradient in gradients)

    rest = (out_bthj, lse_bht, dout_bthj)
    return jax.lax.cond(
        _has_few_documents(inputs),
        lambda: jax.lax.map(of_row, _rows(*inputs[:4], *rest)),
        lambda: portable.backward(inputs, rule, *rest),
    )


class Documents(NamedTuple):
    """Places of the documents of one row, which must not be more than M."""

    begin_n: Int[Array, " n"]
    """First token of each of M documents, and the end. An absent one begins there."""
    document_t: Int[Array, " t"]
    """Document of each token."""
    position_t: Int[Array, " t"]
    """Position of each token in its document."""


def documents_of(row: Inputs) -> Documents:
    """Return the places of the documents in a batch of one row."""
    first_t = row.first_bt[0].astype(jnp.int32)
    t = len(first_t)
    token_t = jnp.arange(t, dtype=jnp.int32)
    is_edge_t = first_t == token_t
    (begin_n,) = jnp.nonzero(is_edge_t, size=max_documents(row) + 1, fill_value=t)
    document_t = jnp.cumsum(is_edge_t, dtype=jnp.int32) - 1
    return Documents(begin_n.astype(jnp.int32), document_t, token_t - first_t)


def _operands(row: Inputs, begin_n: Int[Array, " n"]) -> tuple[Array, ...]:
    """Return the operands of both primitives up to page tables.

    They are queries, keys, values, a bias, lengths and offsets on both sides, and page
    tables of keys and values. There is no bias and no table: the lengths stand in their
    places, unread. Empty arrays would make XLA's partitioner (Shardy) crash, where a
    loop over layers computes the tables of places beforehand.
    """
    i, length_1m = row.q_bthi.shape[3], jnp.diff(begin_n)[None]
    # cuDNN counts numbers, not tokens.
    offsets = (begin_n[None] * array.shape[2] * i for array in row[:2])
    return (*row[:3], *[length_1m] * 3, *offsets, *[length_1m] * 2)


def join(stat_mht: Float[Array, "m h t"], documents: Documents) -> Float[Array, "h t"]:
    """Return the values at the places of documents, by token."""
    return stat_mht[documents.document_t, :, documents.position_t].T


def cut(stat_ht: Float[Array, "h t"], documents: Documents) -> Float[Array, "m h t"]:
    """Return what `join` joins. Values past a document's end are not read."""
    t = stat_ht.shape[1]
    token_mt = documents.begin_n[:-1, None] + jnp.arange(t, dtype=jnp.int32)
    return stat_ht[:, jnp.minimum(token_mt, t - 1)].transpose(1, 0, 2)


def _has_few_documents(inputs: Inputs) -> Bool[Array, ""]:
    """Return whether there is a place for each document of every row."""
    token_t = jnp.arange(inputs.first_bt.shape[1])
    num_b = jnp.sum(inputs.first_bt == token_t, axis=1, dtype=jnp.int32)
    return jnp.max(num_b) <= max_documents(inputs)


def _rows(*arrays: Array) -> tuple[Array, ...]:
    """Return the arrays with each row as a batch of one."""
    return tuple(array[:, None] for array in arrays)


def _options(row: Inputs, rule: Rule) -> dict:
    """Return the parameters that both primitives have."""
    mask = fused.MaskType.PADDING_CAUSAL if rule.is_causal else fused.MaskType.PADDING
    return {
        "scale": scale(row, rule),
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # has a bias, and a gradient of it
        "mask_type": mask,
        "layout": fused.AttentionLayout.BTNH.value,
        "sliding_window_length": rule.window,
    }


def _document_bytes(inputs: Inputs) -> int:
    """Return the bytes of a backward call's workspace for each place: dq in float32,
    and in grouped heads dk and dv of each query head in 16 bits."""
    _, t, h, i = inputs.q_bthi.shape
    return t * h * i * (4 if h == inputs.k_bugi.shape[2] else 8)


def _raise_if_declined(inputs: Inputs, rule: Rule) -> None:
    if why := declines(inputs, rule):
        raise NotImplementedError(f"cuDNN's attention: {why}")


def _why_not_here(inputs: Inputs) -> str | None:
    """Return the reason why this machine's cuDNN or GPU has no attention over packed
    documents, or None."""
    try:
        version = fused.check_cudnn_version()
        layout = fused.AttentionLayout.BTNH.value
        fused.check_is_flash_attention(
            *inputs[:3],
            layout,
            version,
            has_bias=False,
            is_training=True,
            is_packed=True,
        )
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    if version < MIN_VERSION or version in WRONG_VERSIONS:
        major, minor, patch = version // 10000, version // 100 % 100, version % 100
        return f"version {major}.{minor}.{patch} has no right attention over documents"
    return None
