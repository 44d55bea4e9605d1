"""Kernels of attention and arrays [t, t], read in short programs."""

import pytest

from tests.support.hlo_text import read_program
from tools.compiled.attention import find_attention

T = 1024
KERNEL = 'custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax"'
BODY = f"""body
%p = (f32[8,1024]) parameter(0)
%q = f32[8,1024]{{1,0}} get-tuple-element(%p), index=0
%k = f32[8,1024]{{1,0}} {KERNEL}
ROOT %t = (f32[8,1024]) tuple(%k)"""
COND = """cond
%p = (f32[8,1024]) parameter(0)
ROOT %c = pred[] constant(true)"""
FUSED = """fused
%a = f32[8,1024]{1,0} parameter(0)
%mask = f32[4,1024,1024]{2,1,0} broadcast(%a)
ROOT %s = f32[8,1024]{1,0} reduce(%mask)"""


def found(lines: str, t: int = T, weights=((8, 16),)):
    """Return what is found in the entry of a program with a loop and a fusion."""
    entry = f"""%q = f32[8,1024]{{1,0}} parameter(0)
    %init = (f32[8,1024]) tuple(%q)
    %loop = (f32[8,1024]) while(%init), condition=%cond, body=%body
    %f = f32[8,1024]{{1,0}} fusion(%q), kind=kLoop, calls=%fused
    {lines}"""
    return find_attention(read_program(entry, BODY, COND, FUSED), t, weights)


def test_without_a_square_array_there_is_none():
    """An array [t, t] inside a fusion is in no memory, and one dim of size t does not
    count."""
    attention = found("%y = f32[1024,2,512]{2,1,0} negate(%q)")
    assert attention.as_dict() == {
        "attention_calls": {"__cudnn$fmhaSoftmax": 1},
        "largest_square_array": None,
    }
    assert attention.lines() == [
        "attention calls    __cudnn$fmhaSoftmax 1",
        "largest [t, t]     no array [t, t] of t = 1024",
    ]


def test_the_largest_square_array_is_named():
    attention = found(
        """%small = pred[1,1024,1024]{2,1,0} broadcast(%q)
    %large = f32[2,1024,3,1024]{3,2,1,0} broadcast(%q)
    %view = f32[2,3,1024,1024]{3,2,1,0} bitcast(%large)"""
    )
    assert attention.as_dict()["largest_square_array"] == {
        "bytes": 4 * 6 * T * T,
        "shape": "f32[2,1024,3,1024]",
        "source": "",
    }
    assert attention.lines()[1] == "largest [t, t]     f32[2,1024,3,1024], 24.0 MiB"


def test_calls_of_each_kernel_are_counted():
    back = KERNEL.replace("Softmax", "SoftmaxBackward")
    calls = f"%a = f32[8,1024] {KERNEL}\n%b = f32[8,1024] {back}"
    assert found(calls).calls == {
        "__cudnn$fmhaSoftmax": 2,
        "__cudnn$fmhaSoftmaxBackward": 1,
    }


def test_a_width_of_the_model_that_equals_the_window_is_said():
    line = found("%y = bf16[1024,1024]{1,0} negate(%q)", weights=((8, T),)).lines()[1]
    assert "bf16[1024,1024], 2.0 MiB; weights have a dim of 1024 too" in line


@pytest.mark.parametrize("t", [8, 1023])
def test_short_windows_are_not_judged(t):
    attention = found(f"%y = f32[{t},{t}]{{1,0}} negate(%q)", t)
    assert attention.largest_square is None
    assert f"not looked for: t = {t}" in attention.lines()[1]
