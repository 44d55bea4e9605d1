"""Rows between tensors on disk and our parameters, read in both directions.

A row names tensors of equal shape on disk, parameters of ours, and the steps from the
former to the latter. Each step has an inverse, so that a row serves import and export.

Dims of tensors on disk, [out, in] for products:

    v vocabulary    d model    h, g query and key heads    i width of a head
    e experts       f hidden width of an expert or of a dense part
"""

import dataclasses

import numpy as np

from moejax.config import Network
from moejax.interop import views
from moejax.interop.views import View


@dataclasses.dataclass(frozen=True)
class Transpose:
    """Every array with its dims in another order."""

    dims: tuple[int, ...] = (1, 0)

    def load(self, arrays: list[View]) -> list[View]:
        """Return the arrays on our side of this step."""
        return [views.transposed(array, self.dims) for array in arrays]

    def save(self, arrays: list[View]) -> list[View]:
        """Return the arrays on the disk's side of this step."""
        return [views.transposed(array, np.argsort(self.dims)) for array in arrays]


@dataclasses.dataclass(frozen=True)
class Permute:
    """Every array with the rows in another order."""

    order: tuple[int, ...]
    """Row on disk of each of our rows."""

    def load(self, arrays):
        return [views.taken(array, 0, np.array(self.order)) for array in arrays]

    def save(self, arrays):
        return [views.taken(array, 0, np.argsort(self.order)) for array in arrays]


@dataclasses.dataclass(frozen=True)
class Split:
    """One array cut into several along a dim."""

    dim: int
    sizes: tuple[int, ...]
    in_turns: bool = False
    """Whether their entries alternate on disk; else one follows the other."""

    def load(self, arrays):
        (array,) = arrays
        return [views.taken(array, self.dim, place) for place in self._places()]

    def save(self, arrays):
        return [views.joined(arrays, self.dim, self._places())]

    def _places(self) -> list[range]:
        ends = np.cumsum(self.sizes).tolist()
        if self.in_turns:
            return [range(i, ends[-1], len(ends)) for i in range(len(ends))]
        return [range(end - size, end) for end, size in zip(ends, self.sizes)]


@dataclasses.dataclass(frozen=True)
class Stack:
    """Several arrays as one, on a new first dim."""

    def load(self, arrays):
        return [views.stacked(arrays)]

    def save(self, arrays):
        (array,) = arrays
        return [views.item(array, 0, i) for i in range(array.shape[0])]


@dataclasses.dataclass(frozen=True)
class Squeeze:
    """Every array without its first dim, which is 1."""

    def load(self, arrays):
        return [views.item(array, 0, 0) for array in arrays]

    def save(self, arrays):
        return [views.stacked([array]) for array in arrays]


Step = Transpose | Permute | Split | Stack | Squeeze
TURNED = Transpose((0, 2, 1))


@dataclasses.dataclass(frozen=True)
class Row:
    """Tensors on disk and the parameters that are the same numbers."""

    tensors: tuple[str, ...]
    """Names in the file, within a layer if the row is one of a layer."""
    shape: tuple[int, ...]
    """The shape of each tensor on disk."""
    params: tuple[str, ...]
    """Paths in our tree, with dots, within a layer likewise."""
    steps: tuple[Step, ...] = ()

    def load(self, arrays: list[View]) -> list[View]:
        """Return our parameters, made from the tensors."""
        for step in self.steps:
            arrays = step.load(arrays)
        return arrays

    def save(self, arrays: list[View]) -> list[View]:
        """Return the tensors, made from our parameters."""
        for step in reversed(self.steps):
            arrays = step.save(arrays)
        assert all(array.shape == self.shape for array in arrays), self
        return arrays


Rows = list[Row]


def row(name: str, shape: tuple[int, ...], params: str, *steps: Step) -> Row:
    """Return the row of one tensor; `params` are one path or several."""
    return Row((name,), shape, tuple(params.split()), steps)


def product(name: str, out: int, into: int, param: str, *steps: Step) -> Row:
    """Return the row of a product [out, in], which is ours transposed. `steps` act on
    dim 0, before it is transposed."""
    return row(f"{name}.weight", (out, into), param, *steps, Transpose())


def half_split(num_heads: int, width: int, rotated: int | None = None) -> Permute:
    """Return the step by which rows of heads, whose rotary pairs are neighbours
    (2j, 2j + 1), become rows whose pairs are halves (j, j + i/2).

    `rotated` is the number of rows at the end of a head that are rotated; None: all.
    """
    start = 0 if rotated is None else width - rotated
    head = [*range(start), *range(start, width, 2), *range(start + 1, width, 2)]
    heads = range(0, num_heads * width, width)
    return Permute(tuple(first + row for first in heads for row in head))


def attention(net: Network, is_interleaved: bool) -> Rows:
    """Return the rows of grouped-query attention. In an interleaved model the rotary
    pairs of a head are neighbours."""
    model, options, at = net.model, net.attention, "self_attn."
    d, h, g, i = model.d_model, model.num_heads, model.num_kv_heads, model.head_dim
    rows: Rows = []
    for letter, num, dims in (("q", h, "hi"), ("k", g, "gi"), ("v", g, "gi")):
        steps = (half_split(num, i),) if is_interleaved and letter != "v" else ()
        name, param = f"{at}{letter}_proj", f"attention.{letter}"
        rows.append(product(name, num * i, d, f"{param}_d{dims}", *steps))
        if options.bias != "none":
            rows.append(row(f"{name}.bias", (num * i,), f"{param}_bias_{dims}", *steps))
    rows.append(product(f"{at}o_proj", d, h * i, "attention.out_hid"))
    if options.bias == "all":
        rows.append(row(f"{at}o_proj.bias", (d,), "attention.out_bias_d"))
    if model.qk_norm != "none":
        for letter, num in (("q", h), ("k", g)):
            width = i if model.qk_norm == "head" else num * i
            param = f"attention.{letter}_norm.scale_d"
            rows.append(row(f"{at}{letter}_norm.weight", (width,), param))
    if options.sinks:
        rows.append(row(f"{at}sinks", (h,), "attention.sinks_h"))
    return rows


def latent_attention(net: Network) -> Rows:
    """Return the rows of multi-head latent attention, whose rotary pairs are
    neighbours."""
    mla, at, d, h = net.mla, "self_attn.", net.model.d_model, net.model.num_heads
    c, r, rope = mla.kv_lora_rank, mla.q_lora_rank, mla.qk_rope_head_dim
    turn_queries = half_split(h, net.query_dim, rope)
    rows = [
        row(
            f"{at}kv_a_proj_with_mqa.weight", (c + rope, d),
            "attention.kv_a_dc attention.k_rope_di",
            half_split(1, c + rope, rope), Split(0, (c, rope)), Transpose(),
        ),
        row(f"{at}kv_a_layernorm.weight", (c,), "attention.kv_a_norm.scale_d"),
        product(
            f"{at}kv_b_proj", h * (mla.qk_nope_head_dim + mla.v_head_dim), c,
            "attention.kv_b_chj",
        ),
        product(f"{at}o_proj", d, h * mla.v_head_dim, "attention.out_hjd"),
    ]  # fmt: skip
    width = h * net.query_dim
    if r is None:
        query = product(f"{at}q_proj", width, d, "attention.q_dhi", turn_queries)
        return [*rows, query]
    return [
        *rows,
        product(f"{at}q_a_proj", r, d, "attention.q_a_dr"),
        row(f"{at}q_a_layernorm.weight", (r,), "attention.q_a_norm.scale_d"),
        product(f"{at}q_b_proj", width, r, "attention.q_b_rhi", turn_queries),
    ]


def swiglu(net: Network, at: str, width: int) -> Rows:
    """Return the rows of a dense SwiGLU."""
    d = net.model.d_model
    return [
        product(f"{at}gate_proj", width, d, "dense.gate_df"),
        product(f"{at}up_proj", width, d, "dense.up_df"),
        product(f"{at}down_proj", d, width, "dense.down_fd"),
    ]


def router(net: Network, name: str = "mlp.gate") -> Row:
    """Return the row of the router."""
    return product(name, net.moe.num_experts, net.model.d_model, "moe.router_de")


def experts(
    net: Network,
    at: str = "mlp.experts.{}.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Rows:
    """Return the rows of experts that are tensors of their own."""
    d, f = net.model.d_model, net.moe.d_expert
    shapes = ((f, d), (f, d), (d, f))
    params = ("moe.gate_edf", "moe.up_edf", "moe.down_efd")
    places = [at.format(e) for e in range(net.moe.num_experts)]
    return [
        Row(
            tuple(f"{place}{name}.weight" for place in places),
            shape,
            (param,),
            (Stack(), TURNED),
        )
        for name, shape, param in zip(names, shapes, params)
    ]
