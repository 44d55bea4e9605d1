"""Predicted time in which the rows of one layer travel, and the groups of devices that
its collectives join.

    groups(..)       between which devices a layout's collectives run
    row_terms(..)    collectives of rows, by schedule; domains travel by the same ones

A term is a number of equal collectives over a group of mesh axes, on the line of a
calibration for these axes (`moejax.perf.terms`). Sizes are of one pass, in which rows
are dispatched and results return; a step has several (`Passes`). With

    B    buffer of a device's rows for all owners      T   tokens of a tensor group
    MP   devices of the tensor axis                    EP  owners, or their domains
    ESP  shards of an expert

the elements of a pass are, each times the width of a token:

    no tensor axis   all_to_all 2 B over EP
    base             gather T over ESP, all_to_all 2 B over EP, all_reduce B over ESP
    s1               all_to_all 2 B ESP over EP x ESP, gather T over MP
    s2               all_to_all 2 B ESP / MP over EP x ESP, gather B over MP
    s1h              all_to_all 2 B over EP, gather B ESP and reduce_scatter B ESP over
                     ESP, gather T over MP
    local            all_reduce T over MP

moejax.moe.exchange.schedules has the functions on devices.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from moejax.perf import terms
from moejax.perf.calibration import Calibration, leaving_bytes
from moejax.perf.terms import Term, num_devices
from moejax.plan.layout import Layout

Group = dict[str, int]
"""Number of devices along each mesh axis, or part of one, of a group of devices."""


def groups(
    sizes: Mapping[str, int],
    shared: tuple[int, ...] | None = None,
    tensor: int = 1,
    shards: int = 1,
) -> dict[str, Group]:
    """Return the groups of devices between which collectives run, by name.

    owners     between owners of different experts; with domains, between domains
    domain     between the devices of a domain
    shards     between the shards of one expert
    everyone   between owners and shards together
    tensor     along the tensor axis
    outer      along the part of the tensor axis that separates owners
    within     along the part of the expert axis that separates shards

    `sizes` are the numbers of devices along each axis of the group, slow to fast, and
    `shared` those of a domain (None: each device is alone); `tensor` is the size of the
    tensor axis, and `shards` the number of parts of an expert.
    """
    outer, inner = terms.split_axis("tensor", tensor, min(tensor, shards))
    peers: Group = {}
    domain: Group = {}
    for axis, size, inside in zip(sizes, sizes.values(), shared or (1,) * len(sizes)):
        far, near = terms.split_axis(axis, size, inside)
        peers, domain = peers | far, domain | near
    within: Group = {}
    if "expert" in peers and shards > tensor:
        owners, within = terms.split_axis(
            "expert", peers.pop("expert"), shards // tensor
        )
        peers |= owners
    along_tensor = {"tensor": tensor}
    return {
        "owners": peers | outer,
        "domain": domain,
        "shards": within | inner,
        "everyone": (dict(sizes) if shared is None else peers) | along_tensor,
        "tensor": along_tensor,
        "outer": outer,
        "within": within,
    }


def groups_of(layout: Layout, sizes: Mapping[str, int]) -> dict[str, Group]:
    """Return the groups of a layout, on a mesh with these numbers of devices along its
    axes. Without any, all devices are along the last axis, or as the domain says."""
    domain, shared = layout.domain, None
    along = dict.fromkeys(layout.axes, 1)
    if sizes:
        along = {axis: sizes[axis] for axis in layout.axes}
    elif domain is not None:
        along = dict(zip(layout.axes, domain.sizes))
    else:
        tensor, shards = layout.shards
        along[layout.axes[-1]] = layout.num_devices * shards // tensor
    if domain is not None:
        shared = domain.shared
    return groups(along, shared, *layout.shards)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Rows of one exchange in one direction, as one device sends them."""

    size_bytes: float
    """Bytes of the buffer for all owners, in all rounds (B); where rows travel in two
    levels, for those of a node."""
    card_share: float = 0.0
    """Bytes of the cards beside the rows, over those of the rows. They travel once a
    pass: the slots and gates of tokens, or gradients of gates."""
    far_bytes: float | None = None
    """Bytes of the buffer for all nodes, where rows travel in two levels."""
    rounds: int = 1
    """Number of rounds, each of them a collective of its own."""
    ragged_bytes: float | None = None
    """Bytes that leave a device where only rows in use travel; None: whole buffers."""


@dataclasses.dataclass(frozen=True)
class Passes:
    """How often a step exchanges the rows of a layer, and what it gathers beside."""

    count: int
    """Number of times in a step that rows are dispatched: forward and backward, and
    forward again with remat 'full', of each exchange of each micro-batch."""
    returns: int
    """Number of times that results return: a forward pass that runs again does not read
    them."""
    forward: int
    """Number of forward passes, in each of which a layer's tokens are gathered once,
    also where they are exchanged in halves."""
    backward: int
    """Number of backward passes."""
    token_bytes: float = 0.0
    """Bytes of the hidden states of a tensor group's tokens (T)."""
    tokens_count: int = 0
    """Number of times in a step that these are gathered or summed: remat repeats
    neither."""


def row_terms(
    schedule: str | None,
    buffer: Buffer,
    passes: Passes,
    found: Mapping[str, Group],
    lines: Calibration,
    is_hierarchical: bool = False,
) -> tuple[Term, ...]:
    """Return the terms of a layer's rows in one step; `found` are its groups.

    `is_hierarchical` says that rows travel along one axis after the other.
    """
    maker = _Maker(buffer, passes, found, lines, is_hierarchical)
    return tuple(term for term in ROWS[schedule](maker) if term.count)


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Maker of the terms of rows, for one buffer at the speeds of one calibration."""

    buffer: Buffer
    passes: Passes
    groups: Mapping[str, Group]
    lines: Calibration
    is_hierarchical: bool

    def collective(
        self, kind: str, group: str, size: float, count: int, cargo: str = "rows"
    ) -> Term:
        """Return the term of `count` collectives of `size` bytes each; those of rows
        run in rounds."""
        devices = self.groups[group]
        rounds = self.buffer.rounds if cargo == "rows" else 1
        leaving = leaving_bytes(kind, size / rounds, num_devices(devices))
        return terms.collective_term(
            self.lines, kind, devices, leaving, count * rounds, cargo
        )

    def exchanged(self, group: str, size: float) -> list[Term]:
        """Return the terms of sending rows and cards to the devices of a group, and
        rows back."""
        devices, buffer = self.groups[group], self.buffer
        steps = [(devices, size)]
        if self.is_hierarchical:
            steps = [({axis: n}, size) for axis, n in devices.items()]
            if buffer.far_bytes is not None:
                steps[0] = steps[0][0], buffer.far_bytes
        found, passes, rounds = [], self.passes, buffer.rounds
        for step, step_size in steps:
            leaving = leaving_bytes("all_to_all", step_size, num_devices(step))
            if buffer.ragged_bytes is not None:
                leaving = buffer.ragged_bytes
            leaving /= rounds
            args, both = (self.lines, "all_to_all", step), passes.count + passes.returns
            found.append(terms.collective_term(*args, leaving, both * rounds, "rows"))
            if buffer.card_share:
                card = buffer.card_share * leaving, passes.count * rounds
                found.append(terms.collective_term(*args, *card, "cards"))
        return found

    def tokens(self, group: str) -> Term:
        """Return the term of gathering a layer's output, and in training the gradients
        of its split input."""
        size, count = self.passes.token_bytes, self.passes.tokens_count
        return self.collective("all_gather", group, size, count, "tokens")

    @property
    def shards(self) -> int:
        return num_devices(self.groups["shards"])

    @property
    def tensor(self) -> int:
        return num_devices(self.groups["tensor"])


def _plain(m: _Maker) -> Iterator[Term]:
    """Yield the terms of a layer without a tensor axis."""
    yield from m.exchanged("owners", m.buffer.size_bytes)


def _base(m: _Maker) -> Iterator[Term]:
    """Yield the terms of schedule base.

    Tokens are split over the outer part of the tensor axis and gathered over it at the
    end. Over `within` gradients of tokens are gathered in the backward pass.
    """
    size, passes = m.buffer.size_bytes, m.passes
    part = m.shards * min(1.0, m.shards / m.tensor)
    tokens = passes.token_bytes * part
    yield m.collective("all_gather", "shards", tokens, passes.forward, "tokens")
    whole = passes.token_bytes * num_devices(m.groups["within"])
    yield m.collective("all_gather", "within", whole, passes.backward, "gradients")
    yield from m.exchanged("owners", size)
    yield m.collective("all_reduce", "shards", size, passes.returns)
    yield m.tokens("outer")


def _s1(m: _Maker) -> Iterator[Term]:
    """Yield the terms of schedule s1."""
    yield from m.exchanged("everyone", m.buffer.size_bytes * m.shards)
    yield m.tokens("tensor")


def _s2(m: _Maker) -> Iterator[Term]:
    """Yield the terms of schedule s2. Its last all_to_all and gather are serial: XLA
    overlaps no two collectives that share two devices (Parm's SAA needs that)."""
    size, passes = m.buffer.size_bytes, m.passes
    yield from m.exchanged("everyone", size * m.shards / m.tensor)
    yield m.collective("all_gather", "tensor", size, passes.returns)


def _s1h(m: _Maker) -> Iterator[Term]:
    """Yield the terms of schedule s1h."""
    size, passes = m.buffer.size_bytes, m.passes
    yield from m.exchanged("owners", size)
    yield m.collective("all_gather", "shards", size * m.shards, passes.count)
    yield m.collective("reduce_scatter", "shards", size * m.shards, passes.returns)
    yield m.tokens("tensor")


def _local(m: _Maker) -> Iterator[Term]:
    """Yield the terms of schedule local."""
    size, count = m.passes.token_bytes, m.passes.tokens_count
    yield m.collective("all_reduce", "tensor", size, count, "tokens")


ROWS = {
    None: _plain, "s1h": _s1h, "s1": _s1, "s2": _s2, "base": _base, "local": _local,
}  # fmt: skip
"""Function that yields the terms of each schedule's rows."""


def domain_terms(
    size_bytes: float,
    found: Mapping[str, Group],
    lines: Calibration,
    collective: str,
    count: int,
    cargo: str = "",
) -> list[Term]:
    """Return the terms in which the devices of a domain gather one another's experts
    ('all_gather') or sum their gradients ('reduce_scatter'), one for each level.

    `size_bytes` are those of the experts of one device. They cross the slow level
    first; each level sends the experts that all slower levels have gathered.
    """
    levels = []
    for axis, size in found["domain"].items():
        size_bytes *= size
        leaving = leaving_bytes(collective, size_bytes, size)
        levels.append(
            terms.collective_term(
                lines, collective, {axis: size}, leaving, count, cargo
            )
        )
    return levels
