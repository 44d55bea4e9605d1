"""Choice of the size of domains by predicted time.

The devices of a domain gather one another's experts, so that rows travel between
domains only. The times are those of HybridEP's stream model (arXiv 2510.19470),
extended to training.

    G        devices of the group at each level, slow to fast: dc, then expert
    S        devices of a domain at each level: a divisor of G
    D        bytes that a device puts into one all_to_all      row_bytes
    P_E      bytes of the experts of one device                expert_bytes

    collective       bytes that each device sends       when
    all_gather       P_E (S of slower levels) (S - 1)   forward; again with remat
    all_to_all       D (1 - S / G)                      2 forward, 2 backward; 2 more
                                                        with remat 'full'
    reduce_scatter   as the all_gather                  backward: gradients of experts
    all_to_all       P_E (S - 1) over all levels        in place of the reduce_scatter:
                                                        compressed gradients

A device's experts cross the slow level first. All experts that are then on a device
cross the fast level. The paper counts neither the reduce_scatter nor an uplink that
devices share. The lines of a Calibration were measured with all groups at once, so that
they account for a shared uplink.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from moejax.choice import Choice
from moejax.perf import exchange, terms
from moejax.perf.calibration import Calibration
from moejax.perf.terms import Prediction, Term
from moejax.plan.parallel import candidate_domains

DomainSizes = tuple[int, ...]
"""Number of a domain's devices at each level."""


@dataclasses.dataclass(frozen=True)
class LayerTraffic:
    """Bytes and seconds of one MoE layer in one micro-batch, without domains.

    Seconds are those of the forward pass.
    """

    row_bytes: float
    """Bytes of rows that a device puts into one all_to_all (D)."""
    expert_bytes: float
    """Bytes of the experts that one device owns (P_E)."""
    pre_expert_sec: float
    """Time of the work before the experts (attention), which hides gathered experts."""
    expert_sec: float
    """Time of the experts' products."""
    sizes: Mapping[str, int]
    """Number of devices along each mesh axis of the group, slow to fast: {"dc": 2, ..}
    """
    compression: float = 1.0
    """Compression ratio of gathered experts: 50 sends 1/50 of the bytes, 1 all."""
    num_micro_batches: int = 1
    """Number of micro-batches per step. Traffic of once a step is divided by it."""
    is_training: bool = True
    """Whether there is a backward pass."""
    remat: str = "none"
    """Copy of Model.remat."""
    dense_sec: float = 0.0
    """Time of the all_reduce of all other gradients, the same for every domain."""
    is_prefetched: bool = True
    """Whether experts of the next layer travel under the work before them. Compressed
    experts travel after the optimizer, and nothing hides them."""
    is_hierarchical: bool = True
    """Whether rows travel level by level, and not in one all_to_all over all levels."""

    @property
    def num_dispatched(self) -> int:
        """Number of times that rows are sent to experts: forward, backward, and forward
        again with remat 'full'."""
        return 1 + self.is_training * (1 + (self.remat == "full"))

    @property
    def num_computed(self) -> int:
        """Time of the experts in all passes, as a multiple of their forward time."""
        return 1 + self.is_training * (2 + (self.remat != "none"))

    @property
    def num_gathered(self) -> int:
        """Number of times that experts are gathered.

        Compressed experts move once a step, and stay for the backward pass.
        """
        is_repeated = self.remat != "none" and not self.is_compressed
        return 1 + self.is_training * is_repeated

    @property
    def is_compressed(self) -> bool:
        """Whether experts travel compressed: once a step, before its first
        micro-batch."""
        return self.compression > 1


def choose(
    stream: LayerTraffic,
    calibration: Calibration,
    domains: Sequence[DomainSizes] | None = None,
) -> Choice[DomainSizes]:
    """Return the domain that takes the least time of `domains`, smallest first; None:
    of all candidates.

    The smallest of equally fast domains is taken.
    """
    domains = (
        candidate_domains(tuple(stream.sizes.values())) if domains is None else domains
    )
    predictions = {domain: predict(stream, domain, calibration) for domain in domains}
    return terms.fastest(predictions, domains[0])


def predict(
    stream: LayerTraffic, domain: DomainSizes, calibration: Calibration
) -> Prediction:
    """Return the time of one layer and micro-batch, in training with the backward pass.

    Rows are even over experts. Prefetched experts hide under the work before the
    experts, in the forward pass and where remat gathers them again. Nothing hides
    gradients. The formulas are equations 8 to 12, with max(a, b) written as
    a + b - min(a, b). Raises ValueError unless the domain divides each level.
    """
    _check(stream, domain)
    forward = _expert_terms(stream, domain, calibration, "all_gather")
    backward = _expert_terms(stream, domain, calibration, "reduce_scatter")
    gather_sec = sum(term.sec for term in forward) / stream.num_gathered
    is_hidden = stream.is_prefetched and not stream.is_compressed
    num_hidden = stream.num_gathered if is_hidden and gather_sec > 0 else 0
    hidden_sec = num_hidden * min(stream.pre_expert_sec, gather_sec)
    is_summed = stream.is_training and stream.dense_sec > 0
    passes, times = 1 + 2 * stream.is_training, stream.num_computed
    passes += stream.is_training * (stream.remat == "full")
    return terms.make_prediction(
        Term("pre-expert", passes, 0.0, passes * stream.pre_expert_sec),
        *forward,
        Term(
            "hidden under pre-expert", num_hidden * (hidden_sec > 0), 0.0, -hidden_sec
        ),
        *_row_terms(stream, domain, calibration),
        Term("experts", times, 0.0, times * stream.expert_sec),
        *backward,
        Term("dense all_reduce", int(is_summed), 0.0, stream.dense_sec),
    )


def _expert_terms(
    stream: LayerTraffic, domain: DomainSizes, calibration: Calibration, collective: str
) -> list[Term]:
    """Return the terms of experts ('all_gather') or of their gradients
    ('reduce_scatter'), one for each level.

    Each level sends the experts that all slower levels have gathered.
    """
    size_bytes, count = stream.expert_bytes / stream.compression, stream.num_gathered
    parts = stream.num_micro_batches if stream.is_compressed else 1
    if collective == "reduce_scatter":
        size_bytes, count, parts = stream.expert_bytes, int(stream.is_training), 1
    found = exchange.groups(stream.sizes, domain)
    levels = exchange.domain_terms(size_bytes, found, calibration, collective, count)
    return [terms.split_term(term, parts) for term in levels]


def _row_terms(
    stream: LayerTraffic, domain: DomainSizes, calibration: Calibration
) -> tuple[Term, ...]:
    """Return the terms of rows, which travel between devices at the same place of their
    domains."""
    passes = exchange.Passes(
        stream.num_dispatched, 1 + stream.is_training, forward=0, backward=0
    )
    found = exchange.groups(stream.sizes, domain)
    buffer, is_hierarchical = exchange.Buffer(stream.row_bytes), stream.is_hierarchical
    return exchange.row_terms(None, buffer, passes, found, calibration, is_hierarchical)


def _check(stream: LayerTraffic, domain: DomainSizes) -> None:
    """Raise ValueError unless the domain divides each level of the group."""
    sizes = tuple(stream.sizes.values())
    is_divisor = len(domain) == len(sizes) and all(
        size >= 1 and whole % size == 0 for size, whole in zip(domain, sizes)
    )
    if not is_divisor:
        names = " x ".join(f"{axis}={size}" for axis, size in stream.sizes.items())
        raise ValueError(
            f"domain {domain} must divide each level of {names}: use one of "
            f"{candidate_domains(tuple(stream.sizes.values()))}"
        )
