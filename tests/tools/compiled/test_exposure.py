"""Hidden and exposed seconds of collectives, on programs of a few lines.

At these rates a gather takes 48 s and each product 16 s.
"""

import json

import pytest

from tests.support.hlo_text import rates, read_program
from tools.compiled import exposure
from tools.compiled.report import travel_table
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


def test_a_product_between_start_and_done_hides_its_seconds():
    found = summary(START, product("a"), DONE)
    assert found.collective_sec == 48
    assert found.compute_sec == 16
    assert found.step_sec == 48
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
    assert "33.3 % of all collectives" in found.totals()[1]
    record = json.loads(json.dumps(found.as_dict()))
    assert record["collectives"][0]["beside"] == {"dot": 16}
    assert record["rates"]["nvlink_bytes_per_sec"] == 1.0


def test_a_mesh_that_is_no_whole_number_of_nodes_is_refused():
    with pytest.raises(ValueError, match="no whole number of nodes of 8"):
        summary(START, mesh=dict(MESH, expert=12))
