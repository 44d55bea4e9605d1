"""The choice of a domain against HybridEP's tables and formulas, and general laws."""

import itertools
import math

import numpy as np
import pytest

from moejax.perf.calibration import Calibration
from moejax.perf.choose_domain import LayerTraffic, choose, predict
from moejax.plan.parallel import candidate_domains
from tests.support.calibrations import ideal, stream
from tests.support.close import assert_close

# Table IV: Lat_PE in sec, D and P_E in bytes, domains at 128 Gb/s and at 128 GB/s.
TABLE_IV = {
    "Mix-1": (4.9e-5, 8e6, 4.7e6, 1, 2),
    "Mix-2": (4.9e-5, 8e6, 2.35e6, 2, 4),
    "AG-only-1": (9.9e-5, 3e6, 9.4e4, 8, 8),
    "AG-only-2": (9.9e-5, 3e6, 4.7e4, 8, 8),
}


@pytest.mark.parametrize("name", TABLE_IV)
def test_table_iv_comes_out_if_its_gigabits_are_gigabytes(name):
    """128 Gb/s are 16 GB/s, which give smaller domains than the published 2 and 4."""
    pre_expert_sec, row_bytes, expert_bytes, gigabits, gigabytes = TABLE_IV[name]
    here = stream(row_bytes, expert_bytes, pre_expert_sec)
    assert choose(here, ideal(dc=128e9 / 8)).value == (gigabits,)
    assert choose(here, ideal(dc=128e9)).value == (gigabytes,)


def random_case(rng) -> tuple[LayerTraffic, Calibration]:
    dcs, experts = (int(n) for n in rng.choice([1, 2, 3, 4, 6], 2))
    lines = ideal(dc=10 ** rng.uniform(6, 9), expert=10 ** rng.uniform(8, 11))
    here = LayerTraffic(
        row_bytes=10 ** rng.uniform(5, 8), expert_bytes=10 ** rng.uniform(5, 8),
        pre_expert_sec=10 ** rng.uniform(-4, -1), expert_sec=2e-3,
        sizes={"dc": dcs, "expert": experts}, compression=float(rng.choice([1, 50])),
        num_micro_batches=int(rng.integers(1, 4)),
        is_training=bool(rng.integers(2)), remat=str(rng.choice(["none", "full"])),
        dense_sec=1e-3, is_prefetched=bool(rng.integers(2)),
    )  # fmt: skip
    return here, lines


def defined_sec(s: LayerTraffic, domain, lines: Calibration) -> float:
    """Return the time by Equations 8 to 12 for two levels, with the backward pass."""
    (slow, fast), (s0, s1) = s.sizes.values(), domain
    dc, near = (
        lines.collectives["all_to_all"][a]["bytes_per_sec"] for a in ("dc", "expert")
    )
    experts = (s0 - 1) / dc + s0 * (s1 - 1) / near
    is_once = s.compression > 1
    out = s.expert_bytes / s.compression * experts
    out /= s.num_micro_batches if is_once else 1
    pair = 2 * s.row_bytes * ((1 - s0 / slow) / dc + (1 - s1 / fast) / near)
    before = s.pre_expert_sec
    is_hidden = s.is_prefetched and not is_once
    forward = (max(before, out) if is_hidden else before + out) + pair
    forward += s.expert_sec
    if not s.is_training:
        return forward
    back = s.expert_bytes * experts
    again = 0.0
    if s.remat == "full":
        again = before + s.expert_sec + pair / 2  # results need not return
        if not is_once:
            again += max(0.0, out - before) if is_hidden else out
    work = 2 * (before + s.expert_sec)
    return forward + again + work + pair + back + s.dense_sec


def test_choose_is_brute_force_over_the_divisors():
    rng = np.random.default_rng(0)
    chosen = set()
    for _ in range(100):
        here, lines = random_case(rng)
        choice = choose(here, lines)
        every = [
            (i, j)
            for i, j in itertools.product(range(1, 7), repeat=2)
            if here.sizes["dc"] % i == here.sizes["expert"] % j == 0
        ]
        want = {domain: defined_sec(here, domain, lines) for domain in every}
        result = {domain: p.sec for domain, p in choice.alternatives.items()}
        assert_close({d: result[d] for d in sorted(result)}, dict(sorted(want.items())))
        fastest = [d for d in every if want[d] <= min(want.values()) * (1 + 1e-9)]
        assert choice.value == min(fastest, key=lambda d: (math.prod(d), d))
        assert "\n" not in choice.why
        for prediction in choice.alternatives.values():
            assert prediction.sec == sum(t.sec for t in prediction.terms)
        chosen.add(choice.value)
    assert len(chosen) > 5


def test_a_flat_all_to_all_is_on_the_line_of_the_product():
    """16 devices in domains of 2: 7/8 of D leave a device in each of 2 collectives.
    With domains across the DCs, rows stay on the fast axis."""
    here = stream(8e6, 1e6, sizes={"dc": 2, "expert": 8}, is_hierarchical=False)
    lines = ideal(dc=1e6, expert=1e9, dc_expert=1e7)
    terms = {t.name: t for t in predict(here, (1, 2), lines).terms}
    assert terms["all_to_all dc_expert_outer rows"].sec == pytest.approx(14e6 / 1e7)
    terms = {t.name: t for t in predict(here, (2, 1), lines).terms}
    assert terms["all_to_all expert rows"].sec == pytest.approx(14e6 / 1e9)


def test_the_choice_is_among_the_domains_that_are_given():
    here = stream(1e9, 1e6, sizes={"dc": 4, "expert": 2})
    lines = ideal(dc=1e8, expert=1e9)
    assert choose(here, lines).value == (4, 2)
    choice = choose(here, lines, [(1, 1), (4, 1)])
    assert choice.value == (4, 1)
    assert set(choice.alternatives) == {(1, 1), (4, 1)}


@pytest.mark.parametrize("domain", [(3, 1), (2,), (0, 1), (2, 4)])
def test_a_domain_that_does_not_divide_is_refused_in_a_line(domain):
    here = stream(1e6, 1e6, sizes={"dc": 4, "expert": 2})
    with pytest.raises(ValueError, match="must divide each level") as error:
        predict(here, domain, ideal(dc=1e8, expert=1e9))
    assert "\n" not in str(error.value)
    assert candidate_domains((4, 2))[0] == (1, 1)
