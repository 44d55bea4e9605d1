"""Names of tensors as transformers 5 has them in memory, in place of published ones.

    published                             fused                              part
    mlp.experts.3.gate_proj.weight        mlp.experts.gate_up_proj [e 2f d]  [3, :f]
    mlp.experts.3.up_proj.weight          mlp.experts.gate_up_proj           [3, f:]
    mlp.experts.3.down_proj.weight        mlp.experts.down_proj [e d f]      [3]
    block_sparse_moe.gate.weight          mlp.gate.weight                    whole

Its save_pretrained writes the published names, and these with
save_original_format=False. They were read off folders that transformers 5.23 wrote, of
all families here that it fuses.
"""

import re
from collections.abc import Container
from typing import NamedTuple

from moejax.interop import views
from moejax.interop.views import View


class Place(NamedTuple):
    """Where a published tensor is in a fused one."""

    name: str
    expert: int | None = None
    """Index in the first dim; None: the tensor is the same."""
    half: int | None = None
    """Half of the rows of the expert: 0 or 1; None: all."""

    def whole(self, shape: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
        """Return the shape of the fused tensor, from that of the published one."""
        if self.expert is None:
            return shape
        rows, *rest = shape
        return (num_experts, rows if self.half is None else 2 * rows, *rest)

    def part(self, whole: View) -> View:
        """Return the view of the published tensor within that of the fused one."""
        if self.expert is None:
            return whole
        own = views.item(whole, 0, self.expert)
        if self.half is None:
            return own
        rows = own.shape[0] // 2
        return views.taken(own, 0, range(self.half * rows, (self.half + 1) * rows))


GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
EXPERTS = {
    "gate_proj": (GATE_UP, 0), "up_proj": (GATE_UP, 1), "down_proj": (DOWN, None),
    "w1": (GATE_UP, 0), "w3": (GATE_UP, 1), "w2": (DOWN, None),
}  # fmt: skip
"""Fused tensor, and half of it, of each matrix of an expert, w1, w3 and w2 in
Mixtral."""
EXPERT = re.compile(r"experts\.(\d+)\.(\w+)\.weight$")
RENAMED = (
    ("block_sparse_moe.gate.weight", "mlp.gate.weight"),  # Mixtral
    ("block_sparse_moe.experts.", "mlp.experts."),
    ("block_sparse_moe.input_linear.weight", f"block_sparse_moe.{GATE_UP}"),  # Granite
    ("block_sparse_moe.output_linear.weight", f"block_sparse_moe.{DOWN}"),
    ("router.layer.weight", "router.weight"),
    ("mlp.moe_statics.", "mlp.gate.moe_statics."),  # Ernie 4.5
)


def place_of(name: str, names: Container[str]) -> Place:
    """Return where a published tensor is in a folder of tensors with these names: under
    its own where it is there, or where no fused one is."""
    place = _fused_place(name)
    return Place(name) if name in names or place.name not in names else place


def _fused_place(name: str) -> Place:
    renamed = name
    for published, fused in RENAMED:
        renamed = renamed.replace(published, fused)
    found = EXPERT.search(renamed)
    if found is None or found[2] not in EXPERTS:
        return Place(renamed)
    fused, half = EXPERTS[found[2]]
    return Place(renamed[: found.start()] + fused, int(found[1]), half)
