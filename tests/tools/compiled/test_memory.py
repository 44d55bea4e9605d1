"""The kind of a value, by the scopes that made it and by its shape."""

import pytest

from tools.compiled import hlo
from tools.compiled.compile import plain_shape
from tools.compiled.memory import kind_of_argument, kind_of_value
from tools.compiled.origins import Origin, Origins

FORWARD = "jit(_train_step)/while/body/jvp()/while/body"
BACKWARD = "jit(_train_step)/while/body/transpose(jvp())/while/body/checkpoint"
AGAIN = f"{BACKWARD}/rematted_computation"


@pytest.mark.parametrize(
    ("path", "is_weight", "kind"),
    [
        (f"{FORWARD}/attention/mul", False, "activations"),
        (f"{FORWARD}/attention/gathered/all_gather", False, "slots"),
        (f"{AGAIN}/attention/gathered/all_gather", False, "slots"),
        (f"{BACKWARD}/attention/gathered/reduce_scatter", False, "gradients"),
        (f"{BACKWARD}/attention/mul", False, "activations"),
        (f"{FORWARD}/shard_map/dispatch/all_to_all", False, "exchange"),
        (f"{BACKWARD}/shard_map/combine/all_to_all", False, "exchange"),
        (f"{FORWARD}/shard_map/experts/mpmd_map", False, "activations"),
        (f"{FORWARD}/dynamic_update_slice", False, "activations"),
        (f"{BACKWARD}/dynamic_update_slice", True, "gradients"),
        (f"{BACKWARD}/shard_map/experts/mpmd_map", True, "gradients"),
        (f"{AGAIN}/convert_element_type", True, "slots"),
        (f"{FORWARD}/add", True, "activations"),
        ("jit(_train_step)/while/body/gradients/add", True, "gradients"),
        ("jit(_train_step)/transpose(jvp(loss))/while/body/dot", True, "gradients"),
        ("jit(_train_step)/jvp(loss)/while/body/dot", False, "activations"),
        ("jit(_train_step)/optimizer/mul", True, "temporaries"),
        ("", True, "temporaries"),
    ],
)
def test_kinds_of_values(path, is_weight, kind):
    assert kind_of_value(Origin(path, ""), is_weight=is_weight) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("state.params['norm']['scale_d']", "masters"),
        ("state.opt_state[1].mu['norm']['scale_d']", "moments"),
        ("state.opt_state[1].nu['head_vd']", "moments"),
        ("state.opt_state[1].count", "temporaries"),
        ("state.tracked", "slots"),
        ("windows.token_bt", "temporaries"),
    ],
)
def test_kinds_of_arguments(name, kind):
    assert kind_of_argument(name) == kind


def test_plain_shape_ignores_order_and_ones():
    assert plain_shape((1, 8, 3, 1, 2)) == plain_shape((3, 2, 8))


HLO = """HloModule jit_f, is_scheduled=true

FileNames
1 "/home/me/moejax/moe/layer.py"
2 "/opt/site-packages/jax/_src/lax.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=9 end_line=9 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%body (p: (s32[], f32[4], f32[4,4])) -> (s32[], f32[4], f32[4,4]) {
  %p = (s32[], f32[4]{0}, f32[4,4]{1,0}) parameter(0)
  %one = s32[] add(%p#0, %p#0), metadata={op_name="jit(f)/while/body/add"}
  %two = f32[4]{0} multiply(%p#1, %p#1), metadata={op_name="MUL" stack_frame_id=2}
  %bitcast.1 = f32[1,4]{1,0} bitcast(%two)
  %stack = f32[4,4]{1,0} fusion(%p#2, %bitcast.1, %one), metadata={op_name="STACK"}
  ROOT %tuple.1 = (s32[], f32[4]{0}, f32[4,4]{1,0}) tuple(%one, %two, /*index=2*/%stack)
}

%condition (q: (s32[], f32[4], f32[4,4])) -> pred[] {
  %q = (s32[], f32[4]{0}, f32[4,4]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%q#0, %q#0), direction=LT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %zero = s32[] constant(0)
  %zeros = f32[4,4]{1,0} broadcast(%zero), metadata={op_name="broadcast.3"}
  %copy.1 = f32[4,4]{1,0} copy(%zeros)
  %tuple.2 = (s32[], f32[4]{0}, f32[4,4]{1,0}) tuple(%zero, %x, /*index=2*/%copy.1)
  %while.1 = (s32[], f32[4]{0}, f32[4,4]{1,0}) while(%tuple.2), LOOP
  ROOT %copy.2 = f32[4]{0} copy(%while.1#1)
}
"""
for name, text in {
    "LOOP": "condition=%condition, body=%body",
    "MUL": "jit(f)/while/body/mul",
    "STACK": "jit(f)/while/body/dynamic_update_slice",
}.items():
    HLO = HLO.replace(name, text)


@pytest.mark.parametrize(
    ("name", "index"), [("while.1", (1,)), ("p", (1,)), ("copy.2", ())]
)
def test_a_loops_values_come_from_its_body(name, index):
    expected = Origin("jit(f)/while/body/mul", "moejax/moe/layer.py:7")
    assert Origins(hlo.read(HLO)).of(name, index) == expected


@pytest.mark.parametrize(
    ("name", "index"), [("while.1", (2,)), ("zeros", ()), ("copy.1", ())]
)
def test_a_stack_of_turns_has_the_line_of_a_turns_value(name, index):
    origin = Origins(hlo.read(HLO)).of(name, index)
    assert origin.op_name.endswith("dynamic_update_slice")
    assert origin.stacked == "jit(f)/while/body/mul"
    assert origin.source == "moejax/moe/layer.py:7"


def test_arguments_have_their_names():
    assert Origins(hlo.read(HLO)).arguments() == {0: "state.params['w']"}
