"""The choice of a schedule against Parm's equations, counted collectives, and laws."""

import dataclasses

import numpy as np
import pytest

from moejax.moe.exchange.schedules import SCHEDULES as COLLECTIVES
from moejax.perf.calibration import leaving_bytes
from moejax.perf.choose_schedule import MicroBatchShape, choose, predict
from moejax.perf.exchange import ROWS
from moejax.perf.terms import Term
from moejax.plan.schedule_rules import SCHEDULES as RULES
from tests.support.calibrations import KINDS, TWO_LEVELS, calibration, line

SCHEDULES = tuple(RULES)
ALL_BUT_LOCAL = ("s1h", "s1", "s2", "base")
SHAPE = MicroBatchShape(
    tokens=96, d_model=6, d_expert=16, num_experts=8, top_k=2, buffer_factor=1.5,
    itemsize=4, tensor=2, expert_shards=2, sizes={"expert": 4}, is_training=False,
)  # fmt: skip


def test_every_schedule_has_rules_collectives_and_a_time():
    assert set(RULES) == set(COLLECTIVES) - {None} == set(ROWS) - {None}


def communication_sec(prediction) -> float:
    """Return the seconds for rows and tokens, which are all that the papers count."""
    others = ("router", "experts", "counts", "weights")
    return sum(t.sec for t in prediction.terms if not t.name.endswith(others))


# Number of elements of each collective, counted in programs compiled for 8 devices,
# with n d = 96 and T d = 1536. base: gather, all_to_all, all_reduce; s1, s2:
# all_to_all, gather; s1h: all_to_all, gather, reduce_scatter, gather. For (4, 2), base
# has another formula: each half of the tensor axis takes half of the tokens, and
# gathers them at the end.
COUNTED = {
    (2, 2): ([192, 3072, 3072], [1536, 96], [1536, 1536], [768, 1536, 1536, 96]),
    (2, 4): ([384, 6144, 6144], [3072, 96], [3072, 1536], [768, 3072, 3072, 96]),
    (4, 2): ([96, 1536, 1536, 96], [768, 96], [768, 1536], [384, 768, 768, 96]),
    (4, 4): ([384, 6144, 6144], [1536, 96], [1536, 1536], [384, 1536, 1536, 96]),
}
DEVICES_OF = {
    (2, 2): {"tensor": 2, "expert": 4, "expert_tensor": 8},
    (2, 4): {"tensor": 2, "expert_outer": 2, "expert_inner_tensor": 4,
             "expert_tensor": 8},
    (4, 2): {"tensor": 4, "tensor_outer": 2, "tensor_inner": 2,
             "expert_tensor_outer": 4, "expert_tensor": 8},
    (4, 4): {"tensor": 4, "expert": 2, "expert_tensor": 8},
}  # fmt: skip


@pytest.mark.parametrize(("tensor", "shards"), COUNTED)
def test_sizes_are_those_counted_in_compiled_programs(tensor, shards):
    shape = dataclasses.replace(
        SHAPE, tokens=16, top_k=2, buffer_factor=8, tensor=tensor, expert_shards=shards,
        sizes={"expert": 8 // tensor},
    )  # fmt: skip
    names = ("base", "s1", "s2", "s1h")
    for name, want in zip(names, COUNTED[tensor, shards], strict=True):
        result = []
        for term in predict(shape, TWO_LEVELS, name).terms:
            kind, _, rest = term.name.partition(" ")
            group, _, cargo = rest.partition(" ")
            if kind in KINDS and cargo != "counts":
                assert term.count == (2 if kind == "all_to_all" else 1)
                w = DEVICES_OF[tensor, shards][group]
                share = term.count * leaving_bytes(kind, shape.itemsize, w)
                result.append(round(term.bytes / share, 6))
        assert result == want


def by_name(prediction) -> dict[str, Term]:
    assert len({t.name for t in prediction.terms}) == len(prediction.terms)
    return {t.name: t for t in prediction.terms}


TRAINED = dataclasses.replace(SHAPE, is_training=True)
DATA = calibration(expert=line(1e8, 1e-4), tensor=line(1e9), data=line(1e9))
DATA = dataclasses.replace(DATA, mesh={**DATA.mesh, "data": 2})


@pytest.mark.parametrize("name", SCHEDULES)
def test_backward_moves_what_forward_moved(name):
    """Each collective runs once more in the backward pass, and under remat='full' those
    that send rows once again: of two all_to_alls one, and no sum or gather of results.
    Both kinds of remat gather sharded weights again. The transpose of base's
    gather of copies sends nothing."""
    forward, back, again = (
        by_name(predict(dataclasses.replace(SHAPE, **changes), DATA, name))
        for changes in (
            {}, {"is_training": True}, {"is_training": True, "remat": "full"},
        )
    )  # fmt: skip
    once_more = "all_gather tensor tokens" if name == "base" else ""
    group = "data_expert" if name == "local" else "data"
    assert set(back) - set(forward) == {f"reduce_scatter {group} weights"}
    for term, once in forward.items():
        times = {
            "experts": (3, 4), "router": (3, 3), "counts": (1, 1), "weights": (1, 2),
            "tokens": (1, 2) if term == once_more else (2, 2),
        }.get(term.split()[-1])  # fmt: skip
        if times is None:
            of_results = {"all_to_all": 2.5, "reduce_scatter": 2, "all_reduce": 2}
            sends = 2 if name == "s2" else 3  # s2 gathers results, s1h what arrives
            times = 2, of_results.get(term.split()[0], sends)
        result = (back[term].sec / once.sec, again[term].sec / once.sec)
        assert result == pytest.approx(times)


def test_base_gathers_gradients_of_tokens_that_tensor_groups_share():
    """Two groups of 96 tokens of 24 bytes add the gradients of their copies."""
    shape = dataclasses.replace(TRAINED, expert_shards=4)
    terms = by_name(predict(shape, TWO_LEVELS, "base"))
    assert terms["all_gather expert_inner gradients"].bytes == 2 * 96 * 24 / 2
    assert terms["all_gather expert_inner_tensor tokens"].bytes == 4 * 96 * 24 * 3 / 4


def test_computing_by_hand():
    """With 96 tokens of 2 choices on a tensor group of 2 with 2 shards, a device has
    96 x 2 rows of 6 x 6 x 8 FLOPs. base has twice the rows, and routes 192 tokens."""
    slow = calibration(1e6, expert=line(1e8), tensor=line(1e9))
    sec = {
        name: {t: term.sec for t, term in by_name(predict(SHAPE, slow, name)).items()}
        for name in SCHEDULES
    }
    rows = 96 * 2 * 6 * 6 * 8 / 1e6
    one = 2 * 6 * 8 / 1e6
    for name, computed, routed in (
        ("s1", 1, 48), ("s1h", 1, 48), ("s2", 1, 96), ("base", 2, 192),
        ("local", 1, 96),
    ):  # fmt: skip
        assert sec[name]["experts"] == pytest.approx(computed * rows)
        assert sec[name]["router"] == pytest.approx(routed * one)


def test_local_gathers_weights_and_sums_tokens():
    """Weights: half of 8 experts of 3 x 6 x 16 float32, in 8 parts. Tokens: 96 x 24
    B."""
    terms = by_name(predict(TRAINED, DATA, "local"))
    weights = 4 * 3 * 6 * 16 * 4 * 7 / 8
    assert terms["all_gather data_expert weights"].bytes == pytest.approx(weights)
    assert terms["reduce_scatter data_expert weights"].bytes == pytest.approx(weights)
    assert terms["all_reduce tensor tokens"].bytes == pytest.approx(2 * 96 * 24)
    assert not any(name.startswith("all_to_all") for name in terms)


@pytest.mark.parametrize("overlap", [0.0, 0.3, 1.0])
def test_s1_or_s2_by_the_rule_of_equation_4(overlap):
    """s1 is chosen iff G2 - G1 > overlap min(A, G2). Without overlap, that is so iff
    more rows than tokens are gathered (k f > 1)."""
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(100):
        shape = dataclasses.replace(
            SHAPE, tokens=int(2 ** rng.integers(4, 12)), overlap=overlap,
            top_k=int(rng.integers(1, 4)), buffer_factor=rng.uniform(0.6, 2.4),
        )  # fmt: skip
        lines = calibration(
            expert_tensor=line(10 ** rng.uniform(7, 11), 1e-5), tensor=line(1e9, 1e-5),
            expert=line(1e9),
        )  # fmt: skip
        sec = {n: communication_sec(predict(shape, lines, n)) for n in ("s1", "s2")}
        s1, s2 = (by_name(predict(shape, lines, n)) for n in ("s1", "s2"))
        g1, g2 = s1["all_gather tensor tokens"].sec, s2["all_gather tensor rows"].sec
        one_sec = s2["all_to_all expert_tensor rows"].sec / 2
        is_s1 = g2 - g1 > overlap * min(one_sec, g2)
        assert (sec["s1"] < sec["s2"]) == is_s1
        if overlap == 0:
            assert is_s1 == (shape.top_k * shape.buffer_factor > 1)
        seen.add(is_s1)
    assert seen == {True, False}


def test_the_choice_is_the_first_of_the_fastest():
    rng = np.random.default_rng(1)
    chosen = set()
    for _ in range(100):
        tensor = int(rng.choice([1, 2, 4]))
        shape = dataclasses.replace(
            TRAINED, tokens=int(2 ** rng.integers(4, 12)), d_model=2048, tensor=tensor,
            expert_shards=int(rng.choice([1, 2, 4])), d_expert=64, overlap=0.9,
        )  # fmt: skip
        lines = calibration(
            10 ** rng.uniform(10, 14),
            expert=line(10 ** rng.uniform(7, 10), 10 ** rng.uniform(-6, -2)),
            tensor=line(10 ** rng.uniform(8, 11), 10 ** rng.uniform(-7, -4)),
        )
        names = SCHEDULES if tensor > 1 else ALL_BUT_LOCAL
        choice = choose(shape, lines, names)
        sec = {n: predict(shape, lines, n).sec for n in names}
        assert sec[choice.value] <= min(sec.values()) * (1 + 1e-9)
        for name in SCHEDULES[: SCHEDULES.index(choice.value)]:
            assert sec.get(name, np.inf) > sec[choice.value]
        chosen.add(choice.value)
        assert "\n" not in choice.why
        assert set(choice.alternatives) == set(names)
    assert {"s1h", "s1", "s2", "local"} <= chosen
    alone = dataclasses.replace(SHAPE, tensor=1, expert_shards=1)
    choice = choose(alone, TWO_LEVELS, ALL_BUT_LOCAL)
    assert choice.value == "s1h", "the first of equals"
