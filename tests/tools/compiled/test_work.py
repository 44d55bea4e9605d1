"""FLOPs and bytes of instructions against counts by hand."""

import pytest

from tests.support.hlo_text import rates, read_program
from tools.compiled.work import Estimator, Work

LEAVES = """%x = bf16[8,16]{1,0} parameter(0)
%y = bf16[16,32]{1,0} parameter(1)
%rows = s32[4,9]{1,0} parameter(2)
%gate_up = bf16[2,16,2,4]{3,2,1,0} parameter(3)
%down = bf16[2,4,16]{2,1,0} parameter(4)
%q = bf16[1,64,2,16]{3,2,1,0} parameter(5)
%stack = f32[10,8]{1,0} parameter(6)
%row = f32[1,8]{1,0} parameter(7)
%i = s32[] parameter(8)
"""


def work(line: str, *computations: str) -> Work:
    """Return the work of an instruction whose operands are LEAVES."""
    module = read_program(LEAVES + line, *computations)
    main = module.computations["main"]
    return Estimator(module).work(main, main.instructions["r"])


def kernel(name: str, result: str, operands: str) -> str:
    return (
        f'%r = {result} custom-call({operands}), custom_call_target="mosaic_gpu_v2", '
        f'metadata={{op_name="a/experts/{name}/mpmd_map"}}'
    )


def attention(name: str, mask: str) -> str:
    return (
        f'%r = (bf16[1,2,64,16]) custom-call(%q, %q, %q), custom_call_target="{name}", '
        'backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": '
        '{"element_type": "BF16", "dimensions": ["1", "2", "64", "64"], "layout": {}}, '
        f'"mask_type": "{mask}"}}}}'
    )


def test_a_product_is_two_flops_for_each_multiplication():
    line = "%r = bf16[8,32]{1,0} dot(%x, %y), lhs_contracting_dims={1}"
    assert work(line).dense_flops == 2 * 8 * 32 * 16
    cublas = line.replace("dot(", "custom-call(").replace(
        "lhs_contracting_dims={1}",
        'custom_call_target="__cublas$lt$matmul", backend_config={'
        '"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"]}}}',
    )
    assert work(cublas) == work(line)


@pytest.mark.parametrize(
    ("name", "result", "operands"),
    [
        ("grouped_rows", "(bf16[8,4], bf16[8,2,4])", "%rows, %x, %gate_up"),
        ("grouped_matrices", "bf16[2,16,8]", "%rows, %x, %out"),
    ],
)
def test_a_grouped_product_has_the_flops_of_all_rows_of_its_buffer(
    name, result, operands
):
    out = "%out = bf16[8,8]{1,0} parameter(9)\n"
    done = work(out + kernel(name, result, operands))
    assert done.grouped_flops == 2 * 8 * 16 * 8
    assert not done.dense_flops


def test_a_transposed_grouped_product_has_the_same_flops():
    out = "%hidden = bf16[8,8]{1,0} parameter(9)\n"
    back = kernel("grouped_rows", "bf16[8,16]", "%rows, %hidden, %gate_up")
    assert work(out + back).grouped_flops == 2 * 8 * 16 * 8


def test_a_kernel_that_moves_rows_has_bytes_only():
    done = work(kernel("permute_take", "bf16[9,16]{1,0}", "%x, %rows"))
    assert done == Work(num_bytes=2 * 9 * 16 + 2 * 8 * 16 + 4 * 36)


@pytest.mark.parametrize(
    ("name", "mask", "flops"),
    [
        ("__cudnn$fmhaScaleBiasSoftmax", "NO_MASK", 2 * 2 * 2 * 64 * 64 * 16),
        ("__cudnn$fmhaScaleBiasSoftmax", "CAUSAL", 2 * 2 * 2 * 64 * 65 / 2 * 16),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 5 * 2 * 2 * 64 * 65 / 2 * 16),
        ("__cudnn$fmhaSoftmax", "PADDING_CAUSAL", 2 * 2 * 2 * 64 * 65 / 2 * 16),
        ("__cudnn$fmhaSoftmax", "PADDING", 2 * 2 * 2 * 64 * 64 * 16),
    ],
)
def test_attention_has_two_products_forward_and_five_backward(name, mask, flops):
    assert work(attention(name, mask)).attention_flops == flops


def test_a_fusion_has_the_flops_of_the_products_inside():
    inner = """inner
    %a = bf16[8,16]{1,0} parameter(0)
    %b = bf16[16,32]{1,0} parameter(1)
    ROOT %d = bf16[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}"""
    outer = """outer
    %a = bf16[8,16]{1,0} parameter(0)
    %b = bf16[16,32]{1,0} parameter(1)
    ROOT %f = bf16[8,32]{1,0} fusion(%a, %b), kind=kCustom, calls=%inner"""
    line = "%r = bf16[8,32]{1,0} fusion(%x, %y), kind=kCustom, calls=%outer"
    num_bytes = 2 * (8 * 16 + 16 * 32 + 8 * 32)
    assert work(line, inner, outer) == Work(2 * 8 * 32 * 16, num_bytes=num_bytes)


def test_an_asynchronous_instruction_has_its_work_at_its_start():
    wrapped = """wrapped
    %a = bf16[8,16]{1,0} parameter(0)
    %b = bf16[16,32]{1,0} parameter(1)
    ROOT %d = bf16[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}"""
    result = "((bf16[8,16], bf16[16,32]), bf16[8,32])"
    for opcode in ("async", "fusion", "call"):
        start = f"%r = {result} {opcode}-start(%x, %y), calls=%wrapped"
        assert work(start, wrapped).dense_flops == 2 * 8 * 32 * 16
        done = f"%r = bf16[8,32]{{1,0}} {opcode}-done(%x), calls=%wrapped"
        assert work(done, wrapped) == Work()


READ_SLICE = """fused
%a = f32[10,8]{1,0} parameter(0)
%i = s32[] parameter(1)
%b = f32[80]{0} bitcast(%a)
ROOT %s = f32[1,8]{1,0} dynamic-slice(%b, %i)"""
WRITE_SLICE = """fused
%a = f32[10,8]{1,0} parameter(0)
%u = f32[1,8]{1,0} parameter(1)
%i = s32[] parameter(2)
%n = f32[10,8]{1,0} dynamic-update-slice(%a, %u, %i)
ROOT %t = (f32[80]{0}) bitcast(%n)"""


@pytest.mark.parametrize(
    ("line", "fused", "num_bytes"),
    [
        ("%r = f32[1,8]{1,0} fusion(%stack, %i)", READ_SLICE, 2 * 32 + 4),
        ("%r = f32[80]{0} fusion(%stack, %row, %i)", WRITE_SLICE, 2 * 32 + 4),
        ("%r = f32[10,8]{1,0} negate(%stack)", "", 2 * 320),
        ("%r = f32[1,8]{1,0} dynamic-slice(%stack, %i)", "", 2 * 32),
        ("%r = f32[10,8]{1,0} dynamic-update-slice(%stack, %row, %i)", "", 2 * 32),
        ("%r = f32[80]{0} bitcast(%stack)", "", 0),
    ],
)
def test_only_the_slice_of_a_stack_is_read_or_written(line, fused, num_bytes):
    calls = ", kind=kLoop, calls=%fused" if fused else ""
    found = work(line + calls, *filter(None, [fused]))
    assert found == Work(num_bytes=num_bytes)


def test_seconds_are_the_longer_of_flops_and_bytes():
    slow = rates(
        dense_flops_per_sec=2.0,
        grouped_flops_per_sec=4.0,
        hbm_bytes_per_sec=8.0,
        filled_rows=0.5,
    )
    assert Work(dense_flops=8, attention_flops=8, num_bytes=8).seconds(slow) == 8
    assert Work(grouped_flops=64, num_bytes=8).seconds(slow) == 8
    assert Work(dense_flops=2, num_bytes=64).seconds(slow) == 8


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"hbm_bytes_per_sec": 0.0}, "must be above 0"),
        ({"filled_rows": 1.5}, "must be at most 1"),
        ({"unknown_trip_count": -1}, "must be 0 or more"),
    ],
)
def test_impossible_rates_are_refused(fields, rule):
    with pytest.raises(ValueError, match=rule):
        rates(**fields)
