"""Hidden and exposed seconds of collectives, on programs of a few lines.

At these rates a gather takes 48 s and each product 16 s.
"""

import dataclasses
import json

import pytest

from tests.support.hlo_text import rates, read_program
from tools.compiled import exposure
from tools.compiled.costs import profile
from tools.compiled.report import exposed_table, travel_table
from tools.compiled.schedule import Schedule

MESH = {"dc": 1, "data": 1, "expert": 4, "tensor": 1}
RATES = rates(
    dense_flops_per_sec=1.0,
    grouped_flops_per_sec=1.0,
    hbm_bytes_per_sec=2.0**60,
    nvlink_bytes_per_sec=1.0,
)
LEAVES = """%p = f32[4]{0} parameter(0)
%m = f32[2,2]{1,0} parameter(1)
"""
ROOT = "ROOT %done = f32[] constant(0)"
START = "%s = ((f32[4]), f32[16]) all-gather-start(%p), dimensions={0}"
DONE = "%d = f32[16]{0} all-gather-done(%s)"
SECOND_START = START.replace("%s", "%s2")
SECOND_DONE = DONE.replace("%s", "%s2").replace("%d", "%d2")
TRIPS = 'backend_config={"known_trip_count":{"n":"2"}}'
CONDITION = "condition\nROOT %c = pred[] parameter(0)"


def product(name: str, operand: str = "m", more: str = "") -> str:
    dims = "lhs_contracting_dims={1}"
    return f"%{name} = f32[2,2]{{1,0}} dot(%{operand}, %m), {dims}{more}"


def loop(body: str, more: str = f", {TRIPS}") -> str:
    return f"%w = f32[4]{{0}} while(%p), condition=%condition, body=%{body}{more}"


def schedule(*lines: str, computations=(), mesh=MESH, rates=RATES) -> Schedule:
    module = read_program(LEAVES + "\n".join((*lines, ROOT)), *computations)
    return Schedule(module, mesh, 8, rates)


def summary(*lines: str, **options) -> exposure.Summary:
    return exposure.summary(schedule(*lines, **options))


def hidden(*lines: str, computations=()) -> list[float]:
    """Return the hidden seconds of each collective."""
    found = summary(*lines, computations=computations)
    return [e.hidden_sec for e in found.exposures]


def test_costs_are_those_of_one_run_of_each_instruction():
    """A collective costs what it travels, hidden or not, and a loop all its rounds."""
    body = ("body\n" + LEAVES + product("b") + "\n" + ROOT, CONDITION)
    text = profile(schedule(START, product("a"), DONE, loop("body"), computations=body))
    assert sorted(text.splitlines()) == [
        'costs { name: "a" cost_us: 16000000.0000 }',
        'costs { name: "b" cost_us: 16000000.0000 }',
        'costs { name: "s" cost_us: 48000000.0000 }',
        'costs { name: "w" cost_us: 32000000.0000 }',
    ]


def test_a_product_between_start_and_done_hides_its_seconds():
    found = summary(START, product("a"), DONE)
    assert found.collective_sec == 48
    assert found.compute_sec == 16
    assert found.collective_hidden_share == 16 / 48


def test_a_product_outside_start_and_done_hides_nothing():
    assert hidden(product("a"), START, DONE, product("b")) == [0]


def test_no_more_is_hidden_than_the_collective_takes():
    assert hidden(START, *map(product, "abce"), DONE) == [48]


def test_a_product_of_the_collectives_data_hides_nothing():
    data = "%g = f32[2,2]{1,0} get-tuple-element(%s), index=1"
    dependent = product("a", "g")
    later = product("b", "a")
    assert hidden(START, data, dependent, later, product("free"), DONE) == [16]


def test_work_that_waits_for_dependent_work_hides_nothing():
    data = "%g = f32[2,2]{1,0} get-tuple-element(%s), index=1"
    waiting = product("b", more=", control-predecessors={%g}")
    assert hidden(START, data, waiting, DONE) == [0]
    # Being placed after the start is no dependence on its data.
    ordered = product("b", more=", control-predecessors={%s}")
    assert hidden(START, ordered, DONE) == [16]


def test_only_work_that_gives_and_needs_no_data_is_independent():
    needs = START.replace("(%p)", "(%b)")
    chain = product("a"), "%b = f32[4]{0} bitcast(%a)"
    data = "%g = f32[2,2]{1,0} bitcast(%d)"
    lines = *chain, product("x"), needs, product("y"), DONE, data, product("e", "g")
    (found,) = summary(*lines).exposures
    assert found.hidden_sec == 16
    assert found.cause.independent_sec == 32


@pytest.mark.parametrize(
    "line",
    [
        "%x = f32[16]{0} all-gather(%p), dimensions={0}",
        START + ', backend_config={"is_sync":true}',
    ],
)
def test_a_synchronous_collective_hides_behind_nothing(line):
    assert hidden(line, product("a"), DONE.replace("%s", "%p")) == [0]
    assert summary(line).sync_collective_sec == 48
    assert summary(START, DONE).sync_collective_sec == 0


def test_two_collectives_in_flight_share_a_product():
    assert hidden(START, SECOND_START, product("a"), DONE, SECOND_DONE) == [16, 0]
    many = map(product, "abce")
    assert hidden(START, SECOND_START, *many, DONE, SECOND_DONE) == [48, 16]


def test_a_product_goes_to_the_second_when_the_first_is_done():
    lines = START, SECOND_START, product("a"), DONE, product("b"), SECOND_DONE
    assert hidden(*lines) == [16, 16]


BODY = f"""body
%p = f32[4]{{0}} parameter(0)
%m = f32[2,2]{{1,0}} constant(0)
{product("a")}
ROOT %r = f32[4]{{0}} negate(%p)"""
BODY_WITH_GATHER = f"""body
%p = f32[4]{{0}} parameter(0)
%m = f32[2,2]{{1,0}} constant(0)
{START}
{product("a")}
{DONE}
{product("b")}
ROOT %r = f32[4]{{0}} negate(%p)"""


def test_a_loop_hides_the_seconds_of_all_its_rounds():
    found = summary(START, loop("body"), DONE, computations=(BODY, CONDITION))
    assert found.exposures[0].hidden_sec == pytest.approx(32)
    assert found.work.dense_flops == 32
    unknown = summary(START, loop("body", ""), DONE, computations=(BODY, CONDITION))
    assert unknown.exposures[0].hidden_sec == unknown.work.dense_flops == 0


def test_a_loop_does_not_hide_twice_what_it_hides_inside():
    computations = BODY_WITH_GATHER, CONDITION
    lines = SECOND_START, loop("body"), SECOND_DONE
    found = summary(*lines, computations=computations)
    sec = {e.collective.name: e.hidden_sec for e in found.exposures}
    # Each round has two products, of which one hides the gather inside.
    assert sec == pytest.approx({"s": 16, "s2": 32})


def test_shares_count_every_run():
    computations = BODY_WITH_GATHER, CONDITION
    found = summary(loop("body"), SECOND_START, SECOND_DONE, computations=computations)
    assert found.collective_sec == 3 * 48
    assert found.collective_hidden_share == pytest.approx(2 * 16 / (3 * 48))
    (row,) = found.rows()  # they are alike but for their names
    assert row["names"] == ["s", "s2"]
    assert row["runs"] == 3


def test_a_conditional_takes_its_longest_branch():
    long = BODY.replace("body", "long", 1).replace("ROOT", product("b") + "\nROOT")
    line = "%w = f32[4]{0} conditional(%p, %p), branch_computations={%body, %long}"
    found = summary(START, line, DONE, computations=(BODY, long))
    assert found.exposures[0].hidden_sec == pytest.approx(32)


def test_a_conditional_takes_the_branch_with_a_kernel_of_attention():
    kernel = """kernel
    %x = bf16[1,2,1,2]{3,2,1,0} parameter(0)
    %k = bf16[1,2,1,2]{3,2,1,0} custom-call(%x, %x, %x), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"dimensions": ["1", "1", "2", "2"]}, "mask_type": "PADDING_CAUSAL"}}
    ROOT %y = f32[4]{0} bitcast(%k)"""  # noqa: E501
    long = BODY.replace("body", "long", 1).replace("ROOT", product("b") + "\nROOT")
    line = "%w = f32[4]{0} conditional(%p, %p), branch_computations={%long, %kernel}"
    found = summary(line, computations=(kernel, long))
    assert found.work.attention_flops == 2 * 3 * 4  # 3 scores, 2 products 2 wide
    assert not found.work.dense_flops


def test_row_exchanges_have_a_share_of_their_own():
    scope = 'metadata={op_name="jvp()/shard_map/dispatch/all_to_all"}'
    exchange = f"""%e = ((f32[16]), f32[16]) all-to-all-start(%q), {scope}
    {product("a")}
    %f = f32[16]{{0}} all-to-all-done(%e), {scope}"""
    found = summary("%q = f32[16]{0} parameter(2)", exchange, START, DONE)
    assert found.exchange_hidden_share == 16 / 48
    assert found.collective_hidden_share == 16 / 96
    without = summary(START, DONE)
    assert without.exchange_hidden_share is None


def test_the_largest_float32_array_is_one_operand_and_no_reduce_scatter():
    found = summary(
        "%q = f32[64]{0} parameter(2)",
        "%h = bf16[512]{0} parameter(3)",
        "%r = (bf16[512]{0}, f32[4]{0}, f32[4]{0}) all-reduce(%h, %p, %p)",
        "%t = f32[16]{0} reduce-scatter(%q), dimensions={0}",
    )
    assert found.largest_float32_collective_bytes == 16
    assert found.largest_float32_reduce_scatter_bytes == 256


def test_what_is_computed_again_is_counted_and_named():
    again = ', metadata={op_name="transpose(jvp())/rematted_computation/dot"}'
    found = summary(
        product("a", more=again),
        product("b.remat"),
        product("c"),
        START.replace("%s ", "%kept ") + again,
    )
    assert (found.num_remat_ops, found.num_xla_remat_ops) == (2, 1)
    assert found.remat_collectives == ["kept"]
    assert found.xla_remat_collectives == []
    again = summary(START.replace("%s ", "%s.remat ")).xla_remat_collectives
    assert again == ["s.remat"]


def test_the_record_names_what_runs_beside_and_the_rates():
    found = summary(START, product("a"), DONE)
    table = travel_table(found)
    (row,) = (dict(zip(table.columns, row)) for row in table.rows)
    assert row["collective"] == "all-gather (partitioner)"
    assert row["hidden"] == "33.3 %"
    assert row["longest beside it"] == "dot"
    assert "33.3 % of all collectives" in found.totals()[0]
    table = exposed_table(found)
    (row,) = (dict(zip(table.columns, row)) for row in table.rows)
    assert row["reason"] == "data"
    record = json.loads(json.dumps(found.as_dict()))
    assert record["collectives"][0]["beside"] == {"dot": 16}
    assert record["rates"]["nvlink_bytes_per_sec"] == 1.0


def test_a_mesh_that_is_no_whole_number_of_nodes_is_refused():
    with pytest.raises(ValueError, match="no whole number of nodes of 8"):
        summary(START, mesh=dict(MESH, expert=12))


def reason(*lines: str, name="s", computations=()) -> tuple[str | None, str | None]:
    """Return the reason and its phrase of one collective."""
    found = summary(*lines, computations=computations)
    (row,) = (row for row in found.rows() if name in row["names"])
    exposed = sum(row["exposed_by"].values())
    assert exposed == pytest.approx(row["exposed_sec"])
    return row["reason"], row["why"]


SCOPE = 'metadata={{op_name="jvp()/{}/dot_general"}}'


def named(name: str, scope: str, operand: str = "m") -> str:
    return product(name, operand, ", " + SCOPE.format(scope))


def test_a_synchronous_collective_says_what_could_run_beside_it():
    line = "%s = f32[16]{0} all-gather(%p), dimensions={0}"
    found, why = reason(line, named("a", "dense"))
    assert found == "synchronous"
    assert "only 16000.00 of 16000.00 ms of this step's other work" in why
    found, why = reason(line, *map(product, "abce"))
    assert found == "synchronous"
    assert "64000.00 ms of this step's work is independent of it" in why


def test_a_collective_is_exposed_by_its_data():
    """The gather needs two products of its loop and gives one its data; one product is
    independent of it."""
    body = f"""body
    %p = f32[4]{{0}} parameter(0)
    %m = f32[2,2]{{1,0}} constant(0)
    {product("b0")}
    {product("b1", "b0")}
    %b2 = f32[4]{{0}} bitcast(%b1)
    {START.replace("(%p)", "(%b2)")}
    {product("free")}
    {DONE}
    %g = f32[2,2]{{1,0}} bitcast(%d)
    {named("after", "experts", "g")}
    ROOT %r = f32[4]{{0}} negate(%p)"""
    found, why = reason(loop("body"), computations=(body, CONDITION))
    assert found == "data"
    assert why == (
        "only 16000.00 of 64000.00 ms of this loop's other work is independent of it; "
        "it waits for dot (16000.00 ms); dot_general (16000.00 ms) waits for it"
    )


@pytest.mark.parametrize("side", ["before its start", "after its done"])
def test_a_collective_is_exposed_by_its_placement(side):
    work = [*map(product, "bce"), named("a", "dense")]
    is_before = side == "before its start"
    lines = (*work, START, DONE) if is_before else (START, DONE, *work)
    found, why = reason(*lines)
    assert found == "placement"
    assert why.startswith("64000.00 ms of this step's work is independent of it")
    assert why.endswith(side)


def test_a_collective_is_exposed_by_others_in_flight():
    first = SECOND_START.replace("%p", "%q").replace("16", "32")
    lines = (
        "%q = f32[8]{0} parameter(2)",
        first,
        START,
        *map(product, "abce"),
        "%d2 = f32[32]{0} all-gather-done(%s2)",
        DONE,
    )
    found, why = reason(*lines)
    assert found == "crowded"
    assert why == (
        "64000.00 of 64000.00 ms of this step's work that is independent of it hides "
        "other collectives, most of it all-gather (64000.00 ms)"
    )


def test_work_elsewhere_that_hides_others_is_crowded_not_placed():
    lines = SECOND_START, *map(product, "abc"), SECOND_DONE, START, DONE
    assert reason(*lines)[0] == "crowded"


def test_what_is_hidden_or_short_has_no_reason():
    assert reason(START, *map(product, "abc"), DONE) == (None, None)
    fast = dataclasses.replace(RATES, nvlink_bytes_per_sec=2.0**20)
    assert summary(START, DONE, rates=fast).rows()[0]["reason"] is None


def test_the_largest_part_is_the_reason():
    """The gather takes 48 s: one product hides 16 of them, the one behind its done
    could hide 16 more, and nothing can hide the rest."""
    found = summary(START, product("a"), DONE, product("b"))
    (row,) = found.rows()
    parts = {"synchronous": 0, "data": 16, "placement": 16, "crowded": 0}
    assert row["exposed_by"] == parts
    assert row["independent_sec"] == 32
    assert row["reason"] == "data"


def test_products_beside_a_collective_are_named_by_scope_and_operation():
    kernel = """%k = bf16[64,8]{1,0} custom-call(%rows, %weights), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/jvp(experts)/grouped_rows/mpmd_map"}"""  # noqa: E501
    lines = (
        "%rows = bf16[64,4]{1,0} parameter(2)",
        "%weights = bf16[2,4,8]{2,1,0} parameter(3)",
        START,
        kernel,
        named("a", "dense"),
        named("b", "jvp(experts)"),
        loop("body"),
        "%n = f32[2,2]{1,0} negate(%m)",
        DONE,
        named("late", "attention"),
    )
    (found,) = summary(*lines, computations=(BODY, CONDITION)).exposures
    rows = RATES.filled_rows * 2 * 64 * 4 * 8
    assert found.products_beside_sec == {
        "experts/grouped_rows": pytest.approx(rows),
        "dot": 32,
        "dense/dot_general": 16,
        "experts/dot_general": 16,
    }
