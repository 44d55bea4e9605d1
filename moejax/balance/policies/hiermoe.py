"""HierMoE's expert swap (arXiv 2508.09591): experts that are often chosen together
share a device and a node, without copies.

    sec = experts of the fullest device + rows to the fullest device, and to the node

Two experts exchange their owners, again and again: each time those of all pairs that
save most. Maxima are p-norms, in which every device counts a little. What is the
paper's and what is ours: docs/decisions/0038-chosen-together.md.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from moejax.perf.cost_model import CostModel
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.plan.together import Shares, met_share

MAX_RATIO = 1.1
"""Device max/mean that a swap may lead to, where it is not above that already."""
MIN_GAIN = 1e-3
"""Share of a layer's time that a swap must save."""
SQUARINGS = (1, 4)
"""Norms that stand for a maximum, one search after the other, by the logarithm of their
exponents: 2 gathers experts that belong together, and 16 evens the devices out. With 16
alone twice as many rows are left of the cliques in the tests."""


class Prices(NamedTuple):
    """Seconds of a layer in a step, in its three terms."""

    experts_sec: float
    """Experts of a device with the mean load."""
    device_sec: float
    """Rows, if every token sends one to each device."""
    node_sec: float
    """Rows to nodes, if every token sends one to each; 0 without levels."""


def plan(
    load_lwe: np.ndarray,
    layout: Layout,
    cost: CostModel,
    current: ExpertPlan,
    together_lee: np.ndarray | None = None,
) -> ExpertPlan:
    """Return a plan in which experts change owners where that saves time.

    Without `together_lee` choices count as independent: then only loads are evened.
    """
    owned_le = current.owned_le.copy()
    for layer, load_we in enumerate(load_lwe):
        if together_lee is None:
            shares = Shares.independent(load_we.sum(axis=0), layout.top_k)
        else:
            shares = Shares.of(together_lee[layer], layout.top_k)
        prices = layer_prices(load_we, layout, cost)
        owned_le[layer] = place(load_we, shares, owned_le[layer], prices, layout)
    return ExpertPlan(owned_le, layout.num_experts, owned_le)


def layer_prices(load_we: np.ndarray, layout: Layout, cost: CostModel) -> Prices:
    """Return the prices of a layer with this load, in buffers that its rows fill."""
    w, nodes = layout.num_devices, layout.num_nodes
    mean_rows = load_we.sum() / w
    experts_sec = cost.num_computed * cost.row_sec(layout) * mean_rows
    if w == 1 or layout.transport == "local":
        return Prices(experts_sec, 0.0, 0.0)
    # Buffers of all tokens: the time of twice as many rows, less that of as many.
    num_exchanges = cost.micro_batches * layout.num_exchanges
    tokens = layout.source_share * mean_rows / layout.top_k / num_exchanges
    named = "hierarchical" if layout.transport == "hierarchical" else "padded"
    base = dataclasses.replace(layout, transport=named)
    none_ww = np.zeros((w, w))

    def sec_per_row(name: str) -> float:
        rows = getattr(base, name)
        twice = dataclasses.replace(base, **{name: 2 * rows})
        more_sec = cost.rows_sec(none_ww, twice) - cost.rows_sec(none_ww, base)
        return more_sec / rows

    if not layout.has_levels:
        return Prices(experts_sec, tokens * sec_per_row("rows_per_peer"), 0.0)
    device_sec = nodes * tokens * sec_per_row("rows_per_peer")
    return Prices(experts_sec, device_sec, tokens * sec_per_row("rows_per_node"))


def place(
    load_we: np.ndarray,
    shares: Shares,
    owned_e: np.ndarray,
    prices: Prices,
    layout: Layout,
) -> np.ndarray:
    """Return the new owners of one layer: the expert at each position, int32 [e].

    They are the current ones where swaps do not lower `modelled_sec`.
    """
    load_e = load_we.sum(axis=0)
    if layout.num_devices == 1 or not load_e.any():
        return owned_e
    args, new_e = (prices, layout), owned_e
    for squarings in SQUARINGS:
        new_e = _swapped(new_e, _terms(load_e, shares, new_e, *args, squarings))
    before, after = (
        modelled_sec(load_we, shares, each_e, *args) for each_e in (owned_e, new_e)
    )
    return new_e if after < (1 - MIN_GAIN) * before else owned_e


def modelled_sec(
    load_we: np.ndarray,
    shares: Shares,
    owned_e: np.ndarray,
    prices: Prices,
    layout: Layout,
) -> float:
    """Return the seconds of one layer with these owners: the maximum of each term."""
    terms = _terms(load_we.sum(axis=0), shares, owned_e, prices, layout, 0)
    return sum(term.max_sec * float(term.value_d.max()) for term in terms)


def _swapped(owned_e: np.ndarray, terms: list["_Term"]) -> np.ndarray:
    """Return the owners after the best swaps, until none saves enough."""
    owned_e, e = owned_e.copy(), len(owned_e)
    for _ in range(2 * e):
        sec_ee = sum(term.swapped() for term in terms)
        sec_ee[~_may_swap(terms[0])] = np.inf
        best = int(sec_ee.argmin())
        now_sec = sum(term.sec for term in terms)
        if not sec_ee.flat[best] < (1 - MIN_GAIN) * now_sec:
            break
        pair = divmod(best, e)
        terms = [term.after(*pair) for term in terms]
        places = [int(np.flatnonzero(owned_e == expert)[0]) for expert in pair]
        owned_e[places] = pair[::-1]
    return owned_e


def _terms(
    load_e: np.ndarray,
    shares: Shares,
    owned_e: np.ndarray,
    prices: Prices,
    layout: Layout,
    squarings: int,
) -> list["_Term"]:
    """Return the terms of a layer's time; that of the experts is the first."""
    e, w, k = layout.num_experts, layout.num_devices, layout.top_k
    device_e = np.empty(e, int)
    device_e[owned_e] = np.arange(e) * w // e
    even = Shares(load_e * w / load_e.sum(), np.zeros((e, e)))
    terms = [_Term.of(even, device_e, 1, prices.experts_sec, squarings)]
    if prices.device_sec:
        terms.append(_Term.of(shares, device_e, k, prices.device_sec, squarings))
    if prices.node_sec:
        node_e = device_e * layout.num_nodes // w
        terms.append(_Term.of(shares, node_e, k, prices.node_sec, squarings))
    return terms


def _may_swap(experts: "_Term") -> np.ndarray:
    """Return whether two experts are on different devices, neither of which would be
    too full without the other's, bool [e, e]."""
    limit = max(MAX_RATIO, float(experts.value_d.max())) * (1 + 1e-9)
    fits_ee = experts.power_ee <= _power(limit, experts.squarings)
    return fits_ee & fits_ee.T & (experts.at_e[:, None] != experts.at_e)


@dataclasses.dataclass(frozen=True)
class _Term:
    """One term of a layer's time: that of the fullest of some destinations, by a norm
    of their values."""

    shares: Shares
    at_e: np.ndarray
    """Destination of each expert."""
    top_k: int
    max_sec: float
    """Seconds where the value of the fullest destination is 1."""
    squarings: int
    """Logarithm of the norm's exponent to the base 2."""
    value_d: np.ndarray
    """Value of each destination: its load over the mean, or the share of tokens that
    send it a row."""
    power_ee: np.ndarray
    """Power of the value of the first expert's destination, after the second one has
    taken its place."""

    @classmethod
    def of(cls, shares, at_e, top_k: int, max_sec: float, squarings: int) -> "_Term":
        """Return the term of experts at these destinations."""
        e, num = len(at_e), int(at_e.max()) + 1
        empty = np.empty(num), np.empty((e, e))
        term = cls(shares, at_e, top_k, max_sec, squarings, *empty)
        return term._filled(np.arange(num))

    def _filled(self, changed_c: np.ndarray) -> "_Term":
        """Return the term with the values of these destinations computed anew."""
        first_e, both_ee = self.shares
        is_at_ec = self.at_e[:, None] == changed_c
        first_c, near_ec = first_e @ is_at_ec, both_ee @ is_at_ec
        both_c = np.where(is_at_ec, near_ec, 0.0).sum(axis=0)
        value_d, power_ee = self.value_d.copy(), self.power_ee.copy()
        value_d[changed_c] = self._value(first_c, both_c)
        out_x, c_x = np.nonzero(is_at_ec)
        first_xe = (first_c[c_x] - first_e[out_x])[:, None] + first_e
        left_x = both_c[c_x] - 2 * near_ec[out_x, c_x]
        both_xe = left_x[:, None] + 2 * (near_ec.T[c_x] - both_ee[out_x])
        power_ee[out_x] = _power(self._value(first_xe, both_xe), self.squarings)
        return dataclasses.replace(self, value_d=value_d, power_ee=power_ee)

    def _value(self, first: np.ndarray, both: np.ndarray) -> np.ndarray:
        if self.top_k == 1:
            return np.maximum(first, 0.0)
        most = min(self.top_k, len(self.at_e) // len(self.value_d))
        return met_share(first, np.maximum(both, 0.0), self.top_k, most)

    @property
    def sec(self) -> float:
        """Seconds of the term."""
        return float(self._norm_sec(_power(self.value_d, self.squarings).sum()))

    def swapped(self) -> np.ndarray:
        """Return the seconds after each swap of two experts, [e, e]."""
        power_d = _power(self.value_d, self.squarings)
        more_ee = self.power_ee - power_d[self.at_e][:, None]
        sum_ee = np.maximum(power_d.sum() + (more_ee + more_ee.T), 0.0)
        if len(self.value_d) < len(self.at_e):  # a swap within one changes nothing
            is_same_ee = self.at_e[:, None] == self.at_e
            sum_ee = np.where(is_same_ee, power_d.sum(), sum_ee)
        return self._norm_sec(sum_ee)

    def _norm_sec(self, power_sum: np.ndarray) -> np.ndarray:
        norm = power_sum / len(self.value_d)
        for _ in range(self.squarings):
            norm = np.sqrt(norm)
        return self.max_sec * norm

    def after(self, one: int, other: int) -> "_Term":
        """Return the term after a swap of two experts."""
        at_e, pair = self.at_e.copy(), [one, other]
        at_e[pair] = at_e[pair[::-1]]
        moved = dataclasses.replace(self, at_e=at_e)
        return moved if at_e[one] == at_e[other] else moved._filled(at_e[pair])


def _power(value: np.ndarray, squarings: int) -> np.ndarray:
    """Return values to the power of 2 to the number of squarings."""
    for _ in range(squarings):
        value = value * value
    return value
