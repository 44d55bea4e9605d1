"""The reader of compiled programs, on texts in XLA's forms."""

import pytest

from tests.support.hlo_text import HEAD, read_program
from tools.compiled import hlo
from tools.compiled.hlo import Array

TABLES = """FileNames
1 "/home/me/moejax/.venv/lib/python3.12/site-packages/optax/update.py"
2 "/home/me/moejax/train/step/step.py"
3 "/home/me/moejax/moejax/model/blocks.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=2 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=3 function_name_id=1 line=20 end_line=20 column=1 end_column=2}
3 {file_name_id=1 function_name_id=1 line=30 end_line=30 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=2}
4 {file_location_id=3 parent_frame_id=1}
"""


def only(line: str) -> hlo.Instruction:
    """Return the instruction of one line."""
    return next(iter(read_program(line).computations["main"]))


def test_a_computation_is_in_the_order_of_its_schedule():
    module = read_program(
        """%p.2 = f32[4]{0} parameter(0)
        %b.1 = f32[4]{0} negate(%p.2)
        ROOT %a.3 = f32[4]{0} add(%p.2, %b.1)"""
    )
    main = module.computations[module.entry]
    assert [i.name for i in main] == ["p.2", "b.1", "a.3"]
    assert main.root.name == "a.3"
    assert main.root.operands == ("p.2", "b.1")
    assert main.instructions["p.2"].parameter == 0


def test_types_are_read_with_layouts_and_nested_tuples():
    line = (
        "%s = ((bf16[2,8]{1,0:T(8,128)(2,1)S(5)}), /*index=1*/f32[], (pred[3]{0}, "
        "token[])) all-gather-start(bf16[2,8]{1,0:T(8,128)} %x, /*index=1*/%y), "
        "dimensions={0}"
    )
    start = only(line)
    arrays = (("bf16", (2, 8)), ("f32", ()), ("pred", (3,)), ("token", ()))
    assert start.results == tuple(Array(*array) for array in arrays)
    assert start.opcode == "all-gather-start"
    assert start.operands == ("x", "y")
    assert start.num_bytes == 2 * 16 + 4 + 3


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("f8e4m3fn[3]", 3), ("s4[3]", 2), ("c64[2]", 16), ("u32[<=5]", 20)],
)
def test_elements_have_the_bits_in_the_name_of_their_type(text, num_bytes):
    assert only(f"%x = {text}{{0}} iota(), iota_dimension=0").num_bytes == num_bytes


def test_a_kernels_module_is_no_part_of_the_instruction():
    call = only(
        "%k = f32[4]{0} custom-call(%x), "
        'custom_call_target="mosaic_gpu_v2", metadata={op_name="a/b[\\"q\\"]/c" '
        'stack_frame_id=7}, backend_config={module = "calls=%wrong ) to_apply=%bad"}'
    )
    assert call.operands == ("x",)
    assert not call.called
    assert call.op_name == r"a/b[\"q\"]/c"
    assert call.frame == 7


def test_called_computations_are_read_by_role():
    loop = only(
        "%w = (s32[]) while(%t), condition=%c.1, body=%b.2, "
        'backend_config={"known_trip_count":{"n":"12"},"dynamic_variables":[]}'
    )
    assert loop.called == {"condition": ["c.1"], "body": ["b.2"]}
    assert loop.trip_count == 12
    branches = only("%c = f32[] conditional(%i, %x), branch_computations={%a, %b}")
    assert branches.called == {"branch_computations": ["a", "b"]}
    assert only("%w = (s32[]) while(%t), body=%b").trip_count is None
    assert only("%c = f32[2]{0} constant({1, (2)})").operands == ()


@pytest.mark.parametrize(
    ("frame", "source"),
    [
        (1, "train/step/step.py:10"),
        (2, "moejax/model/blocks.py:20"),  # the innermost of two of ours
        (3, "train/step/step.py:10"),  # a library's, called by ours
        (4, ""),  # a library's, called by nobody
        (9, ""),
    ],
)
def test_the_source_is_the_innermost_line_of_ours(frame, source):
    line = f"ROOT %x = f32[] parameter(0), metadata={{stack_frame_id={frame}}}"
    module = hlo.read(f"{HEAD}\n\n{TABLES}\nENTRY %m () -> f32[] {{\n  {line}\n}}\n")
    assert module.source(module.computations["m"].root) == source


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("module @jit_step {", "not the text of an HLO module"),
        ("HloModule jit_step\n", "has no schedule"),
        (HEAD + "\n\n%f (p: f32[]) -> f32[] {\n", "no ENTRY"),
        (HEAD + "\n\nENTRY %f () -> f32[] {\n  %x = f32[] add(%a, %", "cut off"),
    ],
)
def test_other_texts_are_refused(text, rule):
    with pytest.raises(ValueError, match=rule):
        hlo.read(text)
