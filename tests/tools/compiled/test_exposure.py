"""Hidden and exposed seconds of collectives, on programs of a few lines.

At these rates a gather takes 48 s and each product 16 s.
"""

import pytest

from tests.support.hlo_text import rates, read_program
from tools.compiled import exposure

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


def product(name: str) -> str:
    return f"%{name} = f32[2,2]{{1,0}} dot(%m, %m), lhs_contracting_dims={{1}}"


def loop(body: str, more: str = f", {TRIPS}") -> str:
    return f"%w = f32[4]{{0}} while(%p), condition=%condition, body=%{body}{more}"


def summary(*lines: str, computations=(), mesh=MESH) -> exposure.Summary:
    module = read_program(LEAVES + "\n".join((*lines, ROOT)), *computations)
    return exposure.summary(module, mesh, 8, RATES)


def hidden(*lines: str, computations=()) -> list[float]:
    """Return the seconds of each collective that are hidden in a step."""
    found = summary(*lines, computations=computations)
    return [e.seconds - e.exposed_sec for e in found.exposures]


A, B, C, E = map(product, "abce")


@pytest.mark.parametrize(
    ("lines", "hidden_sec"),
    [
        ((START, A, DONE), [16]),
        ((A, START, DONE, B), [0]),
        ((START, A, B, C, E, DONE), [48]),
        ((START, A), [16]),  # its done stands in another round
        ((START, SECOND_START, A), [16, 0]),
        ((START, SECOND_START, A, DONE, SECOND_DONE), [16, 0]),
        ((START, SECOND_START, A, B, C, E, DONE, SECOND_DONE), [48, 16]),
        ((START, SECOND_START, A, DONE, B, SECOND_DONE), [16, 16]),
        (("%x = f32[16]{0} all-gather(%p), dimensions={0}", A), [0]),
        ((START + ', backend_config={"is_sync":true}', A, DONE), [0]),
    ],
)
def test_work_between_start_and_done_hides_one_collective_at_a_time(lines, hidden_sec):
    assert hidden(*lines) == hidden_sec


def test_a_step_takes_its_work_and_what_is_exposed():
    found = summary(START, A, DONE)
    assert (found.collective_sec, found.compute_sec) == (48, 16)
    assert found.step_sec == 48
    assert found.collective_hidden_share == pytest.approx(16 / 48)
    assert found.sync_collective_sec == 0
    assert summary("%x = f32[16]{0} all-gather(%p)").sync_collective_sec == 48


BODY = f"""body
%p = f32[4]{{0}} parameter(0)
%m = f32[2,2]{{1,0}} constant(0)
{A}
ROOT %r = f32[4]{{0}} negate(%p)"""
BODY_WITH_GATHER = BODY.replace(A, "\n".join((START, A, DONE, B)))


def test_a_loop_hides_the_seconds_of_all_its_rounds():
    computations = BODY, CONDITION
    assert hidden(START, loop("body"), DONE, computations=computations) == [32]
    assert hidden(START, loop("body", ""), DONE, computations=computations) == [0]
    found = summary(loop("body"), computations=computations)
    assert found.work.dense_flops == 32


def test_a_loop_does_not_hide_twice_what_it_hides_inside():
    """Each of two rounds has two products, of which one hides the gather inside."""
    lines = SECOND_START, loop("body"), SECOND_DONE
    computations = BODY_WITH_GATHER, CONDITION
    assert hidden(*lines, computations=computations) == pytest.approx([32, 32])


def test_shares_count_every_run_and_those_alike_are_one_row():
    lines = loop("body"), SECOND_START, SECOND_DONE
    found = summary(*lines, computations=(BODY_WITH_GATHER, CONDITION))
    assert found.collective_sec == 3 * 48
    assert found.collective_hidden_share == pytest.approx(2 * 16 / (3 * 48))
    (row,) = found.rows()
    assert row["runs"] == 3
    assert row["exposed_sec"] == pytest.approx(3 * 48 - 32)


KERNEL = """kernel
%x = bf16[1,2,1,2]{3,2,1,0} parameter(0)
%k = bf16[1,2,1,2]{3,2,1,0} custom-call(%x, %x, %x), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"dimensions": ["1", "1", "2", "2"]}, "mask_type": "PADDING_CAUSAL"}}
ROOT %y = f32[4]{0} bitcast(%k)"""  # noqa: E501


def test_a_conditional_takes_its_longest_branch_or_a_kernel_of_attention():
    long = BODY.replace("body", "long", 1).replace("ROOT", B + "\nROOT")
    line = "%w = f32[4]{0} conditional(%p, %p), branch_computations={%body, %long}"
    assert hidden(START, line, DONE, computations=(BODY, long)) == [32]
    line = line.replace("%body", "%kernel")
    found = summary(line, computations=(KERNEL, long))
    assert found.work.attention_flops == 2 * 3 * 4  # 3 scores, 2 products 2 wide
    assert not found.work.dense_flops
    assert found.attention_calls == {"__cudnn$fmhaSoftmax": 1}


def test_row_exchanges_have_a_share_of_their_own():
    scope = 'metadata={op_name="jvp()/shard_map/dispatch/all_to_all"}'
    exchange = f"""%q = f32[16]{{0}} parameter(2)
    %e = ((f32[16]), f32[16]) all-to-all-start(%q), {scope}
    {A}
    %f = f32[16]{{0}} all-to-all-done(%e), {scope}"""
    found = summary(exchange, START, DONE)
    assert found.exchange_hidden_share == pytest.approx(16 / 48)
    assert found.collective_hidden_share == pytest.approx(16 / 96)
    assert summary(START, DONE).exchange_hidden_share is None


def test_what_xla_computes_again_is_counted():
    assert summary(A, product("b.remat"), product("c.remat2.1")).num_xla_remat_ops == 2


def test_a_mesh_that_is_no_whole_number_of_nodes_is_refused():
    with pytest.raises(ValueError, match="no whole number of nodes of 8"):
        summary(START, mesh=dict(MESH, expert=12))
