"""How large domains should be: devices of a domain gather each other's experts, rows
travel between domains alone (HybridEP's stream model, arXiv 2510.19470, for training).

    G        devices of the group, level by level, slow to fast: dc, then expert
    S        devices of a domain at each level: a divisor of the level's
    D        bytes that a device puts into one all_to_all      row_bytes
    P_E      bytes of the experts of one device                expert_bytes

    level        sent once by each device           how often
    all_gather   P_E (S of slower levels) (S - 1)   forward; again with remat
    all_to_all   D (1 - S / G)                      2 forward, 2 back; 2 again, 'full'
    reduce_scatter   as the all_gather              back: gradients of gathered experts
    all_to_all   P_E (S - 1) over all levels        back instead: compressed gradients

Experts cross the slow level first, alone; then the fast level, with what came. The
paper counts neither the reduce_scatter nor an uplink that devices share. Here the lines
of a Calibration were measured with all groups at once: a shared uplink is in them.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping

from moejax.perf import terms
from moejax.perf.calibration import Calibration, leaving_bytes
from moejax.perf.terms import Prediction, Term

DomainSizes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LayerTraffic:
    """What one MoE layer sends and computes in one micro-batch. Seconds are forward."""

    row_bytes: float
    expert_bytes: float
    pre_expert_sec: float
    """Of what comes before the experts (attention): gathered experts hide under it."""
    expert_sec: float
    sizes: Mapping[str, int]
    """Devices along each mesh axis of the group, slow to fast: {"dc": 2, ..}"""
    compression: float = 1.0
    """Moved experts take so many times fewer bytes; 1 is exact."""
    gradient_compression: float | None = None
    """And so many times fewer their gradients, once a step; None: whole."""
    num_micro_batches: int = 1
    """Of a step; what moves once a step counts for each by its share."""
    is_training: bool = True
    remat: str = "none"
    dense_sec: float = 0.0
    """All-reduce of all other gradients: the same for every domain."""
    is_prefetched: bool = True
    """Experts of the next layer travel under the work before them; compressed ones
    after the optimizer, under nothing."""
    is_hierarchical: bool = True
    """Rows travel level by level; else in one all_to_all over all of them."""

    @property
    def num_exchanged(self) -> int:
        """All_to_alls."""
        return 2 + self.is_training * (2 + 2 * (self.remat == "full"))

    @property
    def num_computed(self) -> int:
        """Forward times of the experts."""
        return 1 + self.is_training * (2 + (self.remat != "none"))

    @property
    def num_gathered(self) -> int:
        """How often experts travel. Prefetched ones are kept for the way back."""
        is_kept = self.is_prefetched or self.moves_once
        return 1 + self.is_training * (self.remat != "none" and not is_kept)

    @property
    def moves_once(self) -> bool:
        """Whether experts move once a step, before its first micro-batch: compressed
        ones, and those that gradients are summed by over micro-batches."""
        return self.compression > 1 or self.gradient_compression is not None


@dataclasses.dataclass(frozen=True)
class DomainChoice:
    domain: DomainSizes
    predictions: dict[DomainSizes, Prediction]
    why: str

    def table(self) -> str:
        """Every candidate's predicted time by term, fastest first."""
        return terms.tables(self.predictions)


def choose(
    stream: LayerTraffic, calibration: Calibration, max_bytes: float = math.inf
) -> DomainChoice:
    """The domain that takes the least time, of all divisors of each level; of equally
    fast ones the smallest. Gathered experts may take `max_bytes` on a device."""
    every = candidates(stream.sizes)
    fitting = [d for d in every if gathered_bytes(stream, d) <= max_bytes]
    predictions = {domain: predict(stream, domain, calibration) for domain in fitting}
    chosen = terms.first_fastest(predictions)
    why = f"domain {terms.why(chosen, predictions, every[0])}"
    if len(fitting) < len(every):
        why += (
            f"; {len(every) - len(fitting)} larger ones need more than "
            f"{1e-6 * max_bytes:.4g} MB for gathered experts"
        )
    return DomainChoice(chosen, predictions, why)


def candidates(sizes: Mapping[str, int]) -> list[DomainSizes]:
    """All divisors of each level, smallest first: that is plain expert parallelism."""
    divisors = [
        [size for size in range(1, whole + 1) if whole % size == 0]
        for whole in sizes.values()
    ]
    return sorted(itertools.product(*divisors), key=lambda d: (math.prod(d), d))


def gathered_bytes(stream: LayerTraffic, domain: DomainSizes) -> float:
    """Of one layer's gathered experts on a device: S P_E, its own among them, in full
    size whatever the compression. 0 where nothing is gathered."""
    size = math.prod(domain)
    return size * stream.expert_bytes if size > 1 else 0.0


def share_leaving(domain_size: int, num_devices: int) -> float:
    """The part of the rows that leave a device with S = 1 that still leave it, in one
    level of more than one device: (G - S) / (G - 1), the paper's p."""
    return (num_devices - domain_size) / (num_devices - 1)


def predict(
    stream: LayerTraffic, domain: DomainSizes, calibration: Calibration
) -> Prediction:
    """Seconds of one layer and micro-batch, backward included when training.

    Rows are even over experts. Prefetched experts hide forward, under what comes before
    the experts; gradients, and experts gathered again under remat, hide under nothing.
    Equations 8 to 12, with max(a, b) as a + b - min(a, b). ValueError where the domain
    has not a divisor of each level.
    """
    _check(stream, domain)
    out = _moved(stream, domain, calibration, "all_gather")
    back = _moved(stream, domain, calibration, "reduce_scatter")
    if stream.gradient_compression is not None:
        back = [_scattered(stream, domain, calibration)]
    out_sec = sum(term.sec for term in out) / stream.num_gathered
    is_hidden = stream.is_prefetched and not stream.moves_once
    hidden_sec = min(stream.pre_expert_sec, out_sec) if is_hidden else 0.0
    is_summed = stream.is_training and stream.dense_sec > 0
    passes, times = 1 + 2 * stream.is_training, stream.num_computed
    passes += stream.is_training * (stream.remat == "full")
    return terms.make_prediction(
        Term("pre-expert", passes, 0.0, passes * stream.pre_expert_sec),
        *out,
        Term("hidden under pre-expert", int(hidden_sec > 0), 0.0, -hidden_sec),
        *_exchanged(stream, domain, calibration),
        Term("experts", times, 0.0, times * stream.expert_sec),
        *back,
        Term("dense all_reduce", int(is_summed), 0.0, stream.dense_sec),
    )


def _moved(
    stream: LayerTraffic, domain: DomainSizes, calibration: Calibration, collective: str
) -> list[Term]:
    """Experts on their way out, or their gradients on their way back: level by level,
    in a set that grows."""
    size_bytes, count = stream.expert_bytes / stream.compression, stream.num_gathered
    parts = stream.num_micro_batches if stream.moves_once else 1
    if collective == "reduce_scatter":
        size_bytes, count, parts = stream.expert_bytes, int(stream.is_training), 1
    moved = []
    for axis, size in zip(stream.sizes, domain, strict=True):
        size_bytes *= size
        leaving = leaving_bytes(collective, size_bytes, size)
        term = terms.collective_term(
            calibration, collective, {axis: size}, leaving, count
        )
        moved.append(terms.split_term(term, parts))
    return moved


def _scattered(
    stream: LayerTraffic, domain: DomainSizes, calibration: Calibration
) -> Term:
    """Compressed gradients: to each other member at once, for entries do not add up on
    their way."""
    group = dict(zip(stream.sizes, domain, strict=True))
    size_bytes = math.prod(domain) * stream.expert_bytes / stream.gradient_compression
    leaving = leaving_bytes("all_to_all", size_bytes, math.prod(domain))
    count = int(stream.is_training)
    sizes = (group, leaving, count, "gradients")
    term = terms.collective_term(calibration, "all_to_all", *sizes)
    return terms.split_term(term, stream.num_micro_batches)


def _exchanged(
    stream: LayerTraffic, domain: DomainSizes, calibration: Calibration
) -> list[Term]:
    """Rows between devices at the same place of their domains."""
    pairs = zip(stream.sizes.items(), domain, strict=True)
    apart = {axis: whole // size for (axis, whole), size in pairs}
    levels = [{axis: count} for axis, count in apart.items()]
    exchanged = []
    for group in levels if stream.is_hierarchical else [apart]:
        devices = terms.num_devices(group)
        leaving = leaving_bytes("all_to_all", stream.row_bytes, devices)
        exchanged.append(
            terms.collective_term(
                calibration, "all_to_all", group, leaving, stream.num_exchanged
            )
        )
    return exchanged


def _check(stream: LayerTraffic, domain: DomainSizes) -> None:
    sizes = tuple(stream.sizes.values())
    is_divisor = len(domain) == len(sizes) and all(
        size >= 1 and whole % size == 0 for size, whole in zip(domain, sizes)
    )
    if not is_divisor:
        names = " x ".join(f"{axis}={size}" for axis, size in stream.sizes.items())
        raise ValueError(
            f"domain {domain} must have a divisor of each level of {names}: use one "
            f"of {candidates(stream.sizes)}"
        )
