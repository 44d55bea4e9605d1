"""Under which part of a block expert weights and their gradients travel, on programs of
a few lines.

At these rates a collective takes 48 s and each product 16 s.
"""

import dataclasses

import pytest

from tests.support.hlo_text import rates, read_program
from tools.compiled import exposure, sub_operators
from tools.compiled.report import sub_operator_table
from tools.compiled.schedule import Schedule

MESH = {"dc": 1, "data": 1, "expert": 4, "tensor": 1}
RATES = rates(
    dense_flops_per_sec=1.0,
    grouped_flops_per_sec=1.0,
    hbm_bytes_per_sec=2.0**60,
    nvlink_bytes_per_sec=1.0,
)
FORWARD = "jit(f)/while/body/jvp()/while/body"
BACKWARD = "jit(f)/while/body/transpose(jvp())/while/body"
SLOTS = "shard_map/slots/all_to_all"
TRIPS = 'backend_config={"known_trip_count":{"n":"3"}}'


def product(name: str, path: str) -> str:
    more = f'lhs_contracting_dims={{1}}, metadata={{op_name="{path}/dot_general"}}'
    return f"%{name} = f32[2,2]{{1,0}} dot(%m, %m), {more}"


def start(name: str, path: str) -> str:
    more = f'metadata={{op_name="{path}"}}'
    return f"%{name} = ((f32[16]), f32[16]) all-to-all-start(%q), {more}"


def done(name: str) -> str:
    return f"%{name}.d = f32[16]{{0}} all-to-all-done(%{name})"


def find(*lines: str, computations: tuple[str, ...] = ()):
    """Return the sub-operators in a loop of three rounds with these lines."""
    leaves = "%q = f32[16]{0} parameter(0)\n%m = f32[2,2]{1,0} constant(0)"
    body = "\n".join(("body", leaves, *lines, "ROOT %r = f32[16]{0} negate(%q)"))
    condition = "condition\nROOT %c = pred[] parameter(0)"
    loop = f"%w = f32[16]{{0}} while(%p), condition=%condition, body=%body, {TRIPS}"
    entry = f"%p = f32[16]{{0}} parameter(0)\n{loop}\nROOT %z = f32[] constant(0)"
    module = read_program(entry, body, condition, *computations)
    schedule = Schedule(module, MESH, 8, RATES)
    return sub_operators.find(schedule, exposure.summary(schedule).exposures)


SPLIT = (
    start("first", f"{FORWARD}/{SLOTS}"),
    product("a", f"{FORWARD}/jvp(attention)/shard_map"),
    product("b", f"{FORWARD}/shard_map/route"),
    done("first"),
    start("second", f"{FORWARD}/{SLOTS}"),
    product("c", f"{FORWARD}/shard_map/experts"),
    product("d", f"{FORWARD}/shard_map/experts"),
    product("e", f"{FORWARD}/shard_map/experts"),
    product("f", f"{FORWARD}/shard_map/experts"),
    done("second"),
)


def test_one_sub_operator_travels_under_attention_and_one_under_experts():
    """Pro-Prophet's schedule of one block: the second one is hidden, and of the first
    one a third is exposed."""
    first, second = find(*SPLIT)
    assert (first.name, second.name) == ("first", "second")
    assert first.beside_sec == {"experts": 0, "attention": 16, "rest": 16}
    assert first.hidden_sec == first.beside_sec
    assert first.exposed_sec == 16
    assert second.beside_sec == {"experts": 64, "attention": 0, "rest": 0}
    assert second.hidden_sec == {"experts": 48, "attention": 0, "rest": 0}
    assert second.exposed_sec == 0
    assert {(each.runs, each.num_bytes) for each in (first, second)} == {(3, 64)}


def test_the_report_has_the_split_in_words_and_in_a_table():
    found = find(*SPLIT)
    (line,) = sub_operators.lines(found)
    assert line == (
        "weights forward, 3 runs: 0.0 MiB in 2 collectives, 96000.000 ms of which "
        "48000.000 under experts, 16000.000 under attention, 16000.000 under rest, "
        "16000.000 exposed"
    )
    table = sub_operator_table(found)
    row = dict(zip(table.columns, table.rows[1], strict=True))
    assert row["what"] == "weights forward"
    assert row["beside experts"] == "64000.000"
    assert row["hidden by experts"] == "48000.000"
    assert row["exposed ms"] == "0.000"
    record = found[0].as_dict()
    assert record["exposed_sec"] == 16
    assert set(record) == {"exposed_sec"} | {
        field.name for field in dataclasses.fields(found[0])
    }


@pytest.mark.parametrize(
    ("path", "what", "phase"),
    [
        (f"{FORWARD}/{SLOTS}", "weights", "forward"),
        (f"{BACKWARD}/{SLOTS}", "gradients", "backward"),
        (f"{BACKWARD}/refetch/{SLOTS}", "weights", "backward"),
        (f"{BACKWARD}/rematted_computation/{SLOTS}", "weights", "remat"),
        (f"{FORWARD}/shard_map/slots/domain/all_to_all", "weights", "forward"),
    ],
)
def test_the_path_says_what_travels(path, what, phase):
    (found,) = find(start("s", path), done("s"))
    assert (found.what, found.phase) == (what, phase)


@pytest.mark.parametrize(
    "path", [f"{FORWARD}/shard_map/dispatch/all_to_all", f"{FORWARD}/slots/all_to_all"]
)
def test_rows_and_what_the_partitioner_sends_are_left_out(path):
    assert find(start("s", path), done("s")) == []


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (f"{FORWARD}/jvp(attention)/shard_map/gathered", "attention"),
        (f"{BACKWARD}/rematted_computation/shard_map/experts", "experts"),
        (f"{FORWARD}/shard_map/dispatch", "rest"),
        (FORWARD, "rest"),
    ],
)
def test_the_part_of_a_block_is_a_named_scope(path, part):
    lines = start("s", f"{FORWARD}/{SLOTS}"), product("a", path), done("s")
    (found,) = find(*lines)
    assert found.beside_sec[part] == 16
    assert sum(found.beside_sec.values()) == 16


def test_a_fusion_without_a_name_is_of_the_part_of_most_of_it():
    fused = "\n".join(
        (
            "fused",
            "%m = f32[2,2]{1,0} parameter(0)",
            product("x", f"{FORWARD}/attention"),
            product("y", f"{FORWARD}/attention"),
            "ROOT " + product("z", f"{FORWARD}/experts"),
        )
    )
    fusion = "%f = f32[2,2]{1,0} fusion(%m), kind=kLoop, calls=%fused"
    lines = start("s", f"{FORWARD}/{SLOTS}"), fusion, done("s")
    (found,) = find(*lines, computations=(fused,))
    assert found.beside_sec == {"experts": 0, "attention": 48, "rest": 0}
