"""Collectives in every spelling: their kind, bytes, runs and seconds."""

import pytest

from tests.support.hlo_text import rates, read_program
from tools.compiled import collectives
from tools.compiled.collectives import Part

MESH = {"dc": 1, "data": 1, "expert": 4, "tensor": 1}
ALL = "replica_groups=[1,4]<=[4]"
RATES = rates(nvlink_bytes_per_sec=64.0, infiniband_bytes_per_sec=4.0)
WRAPPED = f"""wrapped
%x = f32[4]{{0}} parameter(0)
ROOT %inner = f32[4]{{0}} all-to-all(%x), {ALL}, dimensions={{0}}"""
PAIRS = {
    "all-gather": (
        f"%s = ((f32[4]), f32[16]) all-gather-start(%p), {ALL}, dimensions={{0}}",
        "%d = f32[16]{0} all-gather-done(%s)",
        64,
    ),
    "all-reduce": (
        f"%s = f32[4]{{0}} all-reduce-start(%p), {ALL}, to_apply=%add",
        "%d = f32[4]{0} all-reduce-done(%s)",
        16,
    ),
    "reduce-scatter": (
        f"%s = ((f32[4]), f32[1]) reduce-scatter-start(%p), {ALL}, to_apply=%add",
        "%d = f32[1]{0} reduce-scatter-done(%s)",
        16,
    ),
    "all-to-all": (
        "%s = ((f32[4]), f32[4], u32[]) async-start(%p), calls=%wrapped",
        "%d = f32[4]{0} async-done(%s)",
        16,
    ),
    "collective-permute": (
        "%s = (f32[4], f32[4]) collective-permute-start(%p), "
        "source_target_pairs={{0,1},{1,0}}",
        "%d = f32[4]{0} collective-permute-done(%s)",
        16,
    ),
    "ragged-all-to-all": (
        f"%s = ((f32[4], f32[4]), f32[4]) ragged-all-to-all-start(%p, %p), {ALL}",
        "%d = f32[4]{0} ragged-all-to-all-done(%s)",
        16,
    ),
    "send": (
        "%s = (f32[4], u32[], token[]) send(%p, %t), channel_id=1",
        "%d = token[] send-done(%s)",
        16,
    ),
    "recv": (
        "%s = (f32[4], u32[], token[]) recv(%t), channel_id=1",
        "%d = (f32[4], token[]) recv-done(%s)",
        16,
    ),
}


def find(lines: str, *computations: str) -> list[collectives.Collective]:
    leaves = "%p = f32[4]{0} parameter(0)\n%t = token[] after-all()\n"
    return collectives.find(read_program(leaves + lines, *computations), MESH)


@pytest.mark.parametrize("kind", PAIRS)
def test_a_start_and_its_done_are_one_asynchronous_collective(kind):
    start, done, num_bytes = PAIRS[kind]
    (found,) = find(f"{start}\n{done}", WRAPPED)
    assert (found.kind, found.name, found.is_async) == (kind, "s", True)
    assert found.parts == (Part("f32", num_bytes),)


def test_a_start_without_a_done_has_the_bytes_of_its_result():
    (found,) = find(PAIRS["all-gather"][0])
    assert found.parts == (Part("f32", 64),)


def test_a_start_that_is_updated_ends_at_its_done():
    lines = """%s = ((f32[4]), f32[16], u32[]) async-start(%p), calls=%wrapped
    %u = ((f32[4]), f32[16], u32[]) async-update(%s)
    %d = f32[4]{0} async-done(%u)"""
    module = read_program(lines, WRAPPED)
    main = module.computations["main"]
    assert collectives.find_done(main, main.instructions["s"]) == "d"


@pytest.mark.parametrize(
    "line",
    [
        f"%x = f32[4]{{0}} all-to-all(%p), {ALL}, dimensions={{0}}",
        f"%x = f32[4]{{0}} all-to-all-start(%p), {ALL}, "
        'backend_config={"collective_backend_config":{"is_sync":true}}',
        "%x = f32[4]{0} fusion(%p), kind=kCustom, calls=%wrapped",
    ],
)
def test_a_synchronous_collective_is_known(line):
    (found,) = find(line, WRAPPED)
    assert (found.kind, found.is_async) == ("all-to-all", False)


def test_a_combined_collective_has_several_parts():
    (found,) = find(
        "%s = (bf16[8]{0}, f32[2]{0}) all-reduce-start(%p, %p), to_apply=%add\n"
        "%d = (bf16[8]{0}, f32[2]{0}) all-reduce-done(%s)"
    )
    assert found.parts == (Part("bf16", 16), Part("f32", 8))


def test_runs_are_the_product_of_the_trip_counts():
    inner = f"""inner
    %x = f32[4]{{0}} parameter(0)
    ROOT %all = f32[4]{{0}} all-reduce(%x), {ALL}, to_apply=%add"""
    middle = """middle
    %y = f32[4]{0} parameter(0)
    %known = f32[4]{0} while(%y), condition=%c, body=%inner, \
backend_config={"known_trip_count":{"n":"3"}}
    %unknown = f32[4]{0} while(%y), condition=%c, body=%later"""
    condition = "c\nROOT %z = pred[] parameter(0)"
    later = inner.replace("inner", "later").replace("%all", "%rare")
    lines = """%w = f32[4]{0} while(%p), condition=%c, body=%middle, \
backend_config={"known_trip_count":{"n":"5"}}
    %again = f32[4]{0} call(%w), to_apply=%inner"""
    found = find(lines, inner, middle, condition, later)
    assert {c.name: c.runs for c in found} == {"all": 16, "rare": 0}
    counted = read_program(lines, inner, middle, condition, later)
    assert collectives.count_runs(counted, unknown_trip_count=2)["later"] == 10
    assert collectives.num_host_waits(counted) == 5


def test_the_host_waits_once_at_a_conditional_whatever_its_branches_do():
    few = "few\nROOT %x = f32[4]{0} parameter(0)"
    many = """many
    %y = f32[4]{0} parameter(0)
    ROOT %loop = f32[4]{0} while(%y), condition=%c, body=%few"""
    condition = "c\nROOT %z = pred[] parameter(0)"
    line = "%one = f32[4]{0} conditional(%p, %p, %p), branch_computations={%few, %many}"
    program = read_program(line, few, many, condition)
    assert collectives.num_host_waits(program) == 1


@pytest.mark.parametrize(
    ("path", "is_ours", "is_exchange", "phase", "scope"),
    [
        ("jit(f)/jvp()/shard_map/dispatch/all_to_all", 1, 1, "forward", "dispatch"),
        (
            "jit(f)/transpose(jvp())/shard_map/while/body/transpose(jvp(combine))/a",
            1,
            1,
            "backward",
            "combine",
        ),
        ("jit(f)/jvp()/shard_map/slots/all_to_all", 1, 0, "forward", "slots"),
        ("jit(f)/jvp()/dispatch/all_to_all", 0, 0, "forward", "dispatch"),
        ("jit(f)/optimizer/mul", 0, 0, "", "optimizer"),
        (
            "jit(f)/transpose(jvp())/rematted_computation/attention/dot",
            0,
            0,
            "remat",
            "attention",
        ),
    ],
)
def test_the_path_says_whose_a_collective_is(path, is_ours, is_exchange, phase, scope):
    (found,) = find(
        f'%x = f32[4]{{0}} all-to-all(%p), {ALL}, metadata={{op_name="{path}"}}'
    )
    assert (found.is_ours, found.is_exchange) == (bool(is_ours), bool(is_exchange))
    assert (found.phase, found.scope) == (phase, scope)
    assert found.is_remat == (phase == "remat")


def test_xlas_own_copies_are_rematerialised():
    lines = "%all-gather.7.remat2.1 = f32[16]{0} all-gather(%p), dimensions={0}"
    (found,) = find(lines)
    assert found.is_remat
    (other,) = find(lines.replace("remat2", "rematch"))
    assert not other.is_remat


def one(kind: str, devices: int = 4) -> collectives.Collective:
    """Return a collective over `devices` devices, of 256 bytes where whole."""
    mesh = dict(MESH, expert=devices)
    pairs = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
    groups = pairs if kind == "collective-permute" else f"replica_groups=[1,{devices}]"
    text = f"%x = f32[64]{{0}} {kind}(%p), {groups}<=[{devices}]"
    (found,) = collectives.find(
        read_program(f"%p = f32[64]{{0}} parameter(0)\n{text}"), mesh
    )
    return found


SLOW_INSIDE = rates(nvlink_bytes_per_sec=1.0, infiniband_bytes_per_sec=64.0)
HALF = rates(nvlink_bytes_per_sec=64.0, filled_rows=0.5)


@pytest.mark.parametrize(
    ("kind", "devices", "per_node", "speeds", "sec"),
    [
        # On one node 3/4 of the bytes travel, 3 s at 64 B/s. On two nodes of two
        # devices: all-to-all sends half of it over the device's card, 32 s at 4 B/s;
        # the others share that half between two cards.
        ("all-to-all", 4, 4, RATES, 3.0),
        ("all-to-all", 4, 2, RATES, 32.0),
        ("all-gather", 4, 4, RATES, 3.0),
        ("all-gather", 4, 2, RATES, 16.0),
        ("reduce-scatter", 4, 2, RATES, 16.0),
        ("all-reduce", 4, 4, RATES, 6.0),
        ("all-reduce", 4, 2, RATES, 32.0),
        ("collective-permute", 4, 4, RATES, 4.0),
        ("collective-permute", 4, 2, RATES, 64.0),
        # Both links carry bytes at once: a quarter goes to the neighbour on the node.
        ("all-to-all", 4, 2, SLOW_INSIDE, 64.0),
        # With one device on each node nothing stays inside.
        ("all-gather", 2, 1, SLOW_INSIDE, 2.0),
        ("ragged-all-to-all", 4, 4, RATES, 3.0),
        ("ragged-all-to-all", 4, 4, HALF, 1.5),  # filled rows alone
    ],
)
def test_seconds_are_the_travelling_bytes_at_the_links_rate(
    kind, devices, per_node, speeds, sec
):
    assert one(kind, devices).seconds(per_node, speeds) == sec


def test_a_collective_has_the_line_of_its_first_user():
    module = read_program(
        """%p = f32[4]{0} parameter(0)
        %g = f32[16]{0} all-gather(%p), dimensions={0}
        %b = f32[16]{0} bitcast(%g)
        ROOT %u = f32[16]{0} negate(%b), metadata={stack_frame_id=3}"""
    )
    module.sources[3] = "moejax/model/blocks.py:20"
    (found,) = collectives.find(module, MESH)
    assert found.source == "moejax/model/blocks.py:20"
