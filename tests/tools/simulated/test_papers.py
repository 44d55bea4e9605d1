"""The papers' tables: prices against equations, and rows that must come out."""

import itertools
import math

import numpy as np
import pytest

from moejax.perf.exchange import ROWS
from moejax.plan.schedule_rules import SCHEDULES as RULES
from tools.simulated.papers import clocks, hybridep, page, parm
from tools.simulated.papers.layers import domain_layer, equal_lines, tensor_layer
from tools.simulated.papers.row import Row, Table, markdown


@pytest.fixture
def no_cards(monkeypatch):
    """The papers send no gates beside rows."""
    monkeypatch.setattr("moejax.perf.cost_model.CARD_BYTES", 0)


def equations(tokens: int, d_model: int, factor: float, tensor: int, shards: int):
    """Return the seconds of a forward pass under each schedule: Parm's (1) to (3) with
    serial collectives, and FSMoE's order for s1h, with lines over elements."""
    blm, etm = tokens * d_model, factor * tokens * d_model
    a2a, ag, rs, ar = (
        lambda n, line=line: line[0] + line[1] * n for line in parm.ALPHA_BETA.values()
    )
    y = etm * shards / tensor
    return {
        "base": ag(blm * shards) + 2 * a2a(etm * shards) + ar(etm * shards),
        "s1": 2 * a2a(y) + ag(blm),
        "s2": 2 * a2a(y) + ag(etm),
        "s1h": 2 * a2a(etm / tensor) + ag(y) + rs(y) + ag(blm),
    }


@pytest.mark.parametrize(("tensor", "shards"), [(2, 2), (2, 4), (4, 4)])
def test_layers_of_parm_take_what_its_equations_say(no_cards, tensor, shards):
    """Forward and backward are twice a forward pass, but for base, whose backward pass
    gathers no tokens, or gradients of groups that share them."""
    for tokens, d, factor in itertools.product((1024, 16_384), (1024, 4096), (1.5, 3)):
        want = equations(tokens, d, factor, tensor, shards)
        for schedule in parm.SCHEDULES:
            layer = tensor_layer(
                parm.equal_elements(tensor, shards), schedule=schedule, tensor=tensor,
                shards=shards, owners=32 // shards, tokens=tokens, factor=factor,
                d_model=d, d_expert=2 * d, flops_per_sec=1e13,
            )  # fmt: skip
            terms = layer.prediction.terms
            links = sum(t.sec for t in terms if t.name != "experts")
            if schedule == "base":
                once = {t.name: t.sec for t in terms if t.count == 1}
                gathered = [s for name, s in once.items() if name.endswith("tokens")]
                links += gathered[0] - sum(
                    s for name, s in once.items() if name.endswith("gradients")
                )
            assert links == pytest.approx(2 * want[schedule])


def test_every_schedule_has_rules_and_a_time():
    assert set(RULES) == set(ROWS) - {None}


def test_s1_or_s2_without_overlap_by_the_rule_of_equation_4(no_cards):
    """s1 is faster iff more rows than tokens are gathered (k f > 1)."""
    for factor in (0.5, 2.0, 4.0):
        sec = {
            schedule: tensor_layer(
                equal_lines({"expert": 4, "tensor": 2}, 1e9, 1e-5), schedule=schedule,
                tensor=2, shards=2, owners=4, tokens=1024, factor=factor, d_model=64,
                d_expert=64, flops_per_sec=1e13,
            ).exchange_sec
            for schedule in ("s1", "s2")
        }  # fmt: skip
        assert (sec["s1"] < sec["s2"]) == (factor > 1)


def test_domains_of_two_levels_take_what_equations_8_to_12_say(no_cards):
    """All divisors of random groups: rows between domains at the slower line of both
    axes, and experts over the slow level first."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        dcs, experts = (int(n) for n in rng.choice([2, 3, 4, 6], 2))
        rate, before = 10 ** rng.uniform(6, 9), 10 ** rng.uniform(-4, -1)
        row_bytes, expert_bytes = 10 ** rng.uniform(5, 8, 2)
        sizes = {"dc": dcs, "expert": experts}
        lines = equal_lines(sizes, rate)
        for s0, s1 in itertools.product(range(1, 7), repeat=2):
            if dcs % s0 or experts % s1:
                continue
            layer = domain_layer(
                lines, sizes, (s0, s1), row_bytes=row_bytes, expert_bytes=expert_bytes,
                before_sec=before,
            )  # fmt: skip
            gathered = expert_bytes * (s0 - 1 + s0 * (s1 - 1)) / rate
            rows = 2 * row_bytes * (1 - s0 * s1 / (dcs * experts)) / rate
            assert layer.forward_sec == pytest.approx(max(before, gathered) + rows)


def rows_of(table: Table) -> dict[str, Row]:
    return {row.what: row for row in table.rows}


def test_table_vii_comes_out():
    assert {row.verdict for row in hybridep.tables()[0].rows} == {"yes"}


def test_table_iv_comes_out_if_its_gigabits_are_gigabytes():
    rows = rows_of(hybridep.tables()[1])
    verdicts = {name: row.verdict for name, row in rows.items()}
    gigabytes = [v for name, v in verdicts.items() if "GB/s" in name]
    assert gigabytes == ["yes"] * 4
    bits = [rows[name].priced for name in rows if "Gb/s" in name]
    assert bits == [1, 2, 8, 8]


def test_table_v_needs_a_shared_card():
    """96 more MB of rows cost 24 exchanges of half of them over 1/8 of 10 Gb/s."""
    row = rows_of(hybridep.tables()[2])["Cluster-M, Tutel, slope between 96 and 192 MB"]
    assert row.priced == pytest.approx(24 * 0.5e6 / (10e9 / 8 / 8) * 1e3)
    assert row.verdict == "yes"


def test_a_thousand_data_centres_follow_the_bound():
    for row in hybridep.tables()[-1].rows:
        size = int(row.what.split()[-1])
        bound = (1 - 1 / 1000) / (1 - size / 1000)
        assert row.priced == pytest.approx(bound, rel=1e-2)


def test_our_clocks_and_the_price_agree():
    cells = clocks.cells()
    assert clocks.correlation(cells) >= 0.95
    assert sum(cell.is_right for cell in cells) >= 9
    found, right, pairs = clocks.race_figures()
    assert found >= 0.95
    assert right >= 0.9 * pairs
    best = min(cells[0].measured_sec)
    right = clocks.Cell("", ("a", "b"), (best, 1.05 * best), (2.0, 1.0))
    wrong = clocks.Cell("", ("a", "b"), (best, 1.5 * best), (2.0, 1.0))
    assert right.is_right
    assert not wrong.is_right


def test_a_verdict_is_within_the_tolerance_or_equal_words():
    assert Row("", 2.0, 2.29).verdict == "yes"
    assert Row("", 2.0, 2.31).verdict == "no"
    assert Row("", 2.0, 1.0, tolerance=0).verdict == "no"
    assert Row("", "a", "a").verdict == "yes"
    assert Row("", "about 3 x", 3.0).verdict == ""
    text = markdown(Table("T", "S.", (Row("w", 2.0, 4.0, "ms", note="why"),)))
    assert "| w | 2 ms | 4 ms | no | why |" in text
    assert math.isclose(Row("", 2.0, 4.0).ratio, 2.0)


def test_the_page_has_the_tables_of_today(repo):
    """The page has tables that take a second; `long` makes the whole of it."""
    text = (repo / "docs" / "papers.md").read_text(encoding="utf-8")
    for table in hybridep.tables():
        assert markdown(table) in text
    assert clocks.markdown() in text


@pytest.mark.long
def test_the_page_is_what_the_program_prints(repo):
    text = (repo / "docs" / "papers.md").read_text(encoding="utf-8")
    assert text == page.make()[0]
