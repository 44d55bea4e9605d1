"""Times of a layer and of a step by parts, as the cost model adds them up."""

import dataclasses
from typing import NamedTuple

from moejax.perf.terms import Term
from moejax.rich import shown_by


class WeightTerms(NamedTuple):
    """Terms of one layer's weights and their gradients in one step, by what can hide
    them (CostModel.sync_sec)."""

    ahead: tuple[Term, ...]
    """Weights of the forward pass."""
    back: tuple[Term, ...]
    """Gradients, and weights that the backward pass fetches again."""
    once: tuple[Term, ...]
    """What nothing hides: once a step, or when a layer's loads are known."""

    @property
    def sec(self) -> float:
        """Seconds of all terms together."""
        return sum_sec(self.ahead) + sum_sec(self.back) + sum_sec(self.once)


class LayerTimes(NamedTuple):
    """Times of one layer in one step."""

    mean_sec: float
    """Forward time of a device with the mean number of rows."""
    forward_sec: float
    """Forward time of the fullest device (T_FEC)."""
    rows: tuple[Term, ...]
    weights: WeightTerms
    hidden_sec: float
    """Time of weights and gradients that other work hides."""

    @property
    def sync_sec(self) -> float:
        """Exposed time of weights and gradients (T_sync)."""
        return self.weights.sec - self.hidden_sec


def repeated(term: Term, times: int) -> Term:
    """Return the term of a number of equal ones."""
    return Term(term.name, times * term.count, times * term.bytes, times * term.sec)


def sum_sec(found: tuple[Term, ...]) -> float:
    """Return the seconds of terms together."""
    return sum(term.sec for term in found)


@shown_by("step_parts")
@dataclasses.dataclass(frozen=True)
class StepParts:
    """Modelled seconds of a step's blocks, by what takes them. Embedding, head,
    optimizer and gradients of dense parameters are in none of them."""

    experts: float
    """Experts, if every device had the mean number of rows."""
    wait: float
    """Waiting for the fullest device of each layer."""
    wires: float
    """Exchanges of rows."""
    copies: float
    """Weights that travel to slots and gradients that return, as far as no other work
    hides them."""
    blocks: float
    """The rest of the blocks, such as attention."""

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return self.experts + self.wait + self.wires + self.copies + self.blocks
