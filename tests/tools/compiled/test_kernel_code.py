"""Test figures read from ptxas and from machine code, against counts by hand; and the
kernels, compiled with default tiles, equal a golden file."""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from moejax.kernels.shapes import MODEL_SHAPES
from moejax.kernels.tuning import Tiles
from moejax.perf import target
from moejax.plan.layout import max_aligned_rows
from tests.support.golden_kernel_code import text as golden_text
from tools import kernel_code as tool
from tools.compiled import kernel_cases, ptxas, sass

ROOT = pathlib.Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "kernel_code" / "default.json"
LIMIT_SEC = 1800
PTXAS = """
ptxas info    : (C7519) warpgroup.arrive is injected in around line 707 by compiler to
ptxas warning : (C7510) Potential Performance Loss: wgmma.mma_async are serialized
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'grouped_rows_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for grouped_rows_mosaic_gpu_kernel
    96 bytes stack frame, 92 bytes spill stores, 88 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 96 bytes cumulative stack size
"""
SASS = """
grouped_rows_mosaic_gpu_kernel:
   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
   -:-:-:-:02        /*0010*/                   S2R R230, SR_TID.X
   1:-:-:Y:05        /*0020*/               @P2 BRA `(.L_x_9)
.L_x_1:
   -:-:1:Y:02        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR9]
   1:-:-:Y:05        /*0040*/              @!P1 BRA `(.L_x_7)
.L_x_2:
   -:-:-:Y:01        /*0050*/              @!P3 BRA `(.L_x_3)
   -:-:-:Y:01        /*0060*/                   STSM.16.M88.4 [R2], R4
   -:-:-:Y:01        /*0070*/                   BAR.SYNC.DEFER_BLOCKING R13, 0x80
.L_x_3:
   -:-:-:Y:08        /*0080*/                   HGMMA.64x128x16.F32.BF16 R24, gd[UR20]
   -:-:-:Y:03        /*0090*/                   HGMMA.64x128x16.F32.BF16 R24, gd[UR24]
   -:-:-:Y:05        /*00a0*/              @!P1 BRA `(.L_x_4)
   -:-:-:Y:03        /*00b0*/                   SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR9], RZ
.L_x_4:
   -:-:-:Y:05        /*00c0*/               @P1 BRA `(.L_x_1)
   -:-:-:Y:01        /*00d0*/                   MUFU.EX2 R3, R3
   -:-:-:Y:01        /*00e0*/                   STL [R1], R3
   -:-:-:Y:01        /*00f0*/                   FENCE.VIEW.ASYNC.S
   -:-:-:Y:01        /*0100*/                   UTMASTG.3D [UR8], [UR4]
   -:-:-:Y:01        /*0110*/                   EXIT
.L_x_9:
   -:-:-:Y:04        /*0120*/              @UP1 UTMALDG.4D [UR32], [UR8]
   -:-:-:Y:06        /*0130*/                   BAR.SYNC.DEFER_BLOCKING R13, 0x80
   -:-:-:Y:05        /*0140*/               @P0 BRA `(.L_x_9)
   -:-:-:Y:05        /*0150*/                   EXIT
.L_x_7:
   -:-:-:Y:02        /*0160*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR9]
   -:-:-:Y:05        /*0170*/              @!P1 BRA `(.L_x_7)
   -:-:-:Y:05        /*0180*/                   BRA `(.L_x_2)
.L_x_8:
   -:-:-:-:00        /*0190*/                   BRA `(.L_x_8)
   -:-:-:-:00        /*01a0*/                   NOP
"""
"""A kernel with a loop that multiplies, whose wait is behind the kernel and of which a
part is passed by few stages, and with a loop that copies."""


def test_ptxas_says_registers_spills_and_remarks():
    found = ptxas.read(PTXAS)
    assert found == ptxas.Registers(168, 16, 96, 92, 88, ("C7510", "C7519"))
    assert found.is_serialised
    assert found.keeps_max_registers


def test_the_text_of_two_kernels_is_refused():
    with pytest.raises(ValueError, match="of one kernel, and reports 2"):
        ptxas.read(PTXAS * 2)


def test_a_kernel_and_its_loops_are_counted():
    found = sass.read(SASS)
    # Two barriers of threads, and 26 instructions without the padding.
    assert (found.instructions, found.registers, found.barriers) == (26, 231, 2)
    assert (found.fences, found.specials, found.stores, found.spills) == (1, 1, 1, 1)
    # The wait, its branch, the branch around the blanking, two products, the release.
    assert found.computing == sass.Loop(
        instructions=8,
        issue_cycles=2 + 5 + 1 + 8 + 3 + 5 + 3 + 5,
        products=2,
        loads=0,
        barriers=0,
        fences=0,
        arrives=1,
        waits=1,
        spills=0,
    )
    assert found.copying == sass.Loop(3, 15, 0, 1, 1, 0, 0, 0, 0)


def test_a_kernel_without_loops_has_none():
    found = sass.read("   -:-:-:Y:01    /*0000*/     EXIT\n")
    assert (found.instructions, found.computing, found.copying) == (1, None, None)


def test_text_without_instructions_is_refused():
    with pytest.raises(ValueError, match="no instruction is in the machine code"):
        sass.read("nvdisasm fatal: no such file")


def test_no_product_spills_in_the_golden_file():
    golden = json.loads(GOLDEN.read_text())["kernels"]
    products = [row for row in golden if row["shape"]]
    names = {(row["shape"], row["case"]) for row in products}
    assert names == set(itertools.product(MODEL_SHAPES, kernel_cases.PRODUCTS))
    assert {tuple(row["codes"]) for row in products} == {("C7519",)}
    assert {row["spill_store_bytes"] for row in products} == {0}


def test_tiles_are_the_default_ones_but_for_some_fields():
    tiles, _, arguments = kernel_cases.product(
        "olmoe_1b_7b", "wgrad", {"stages": 3}, "bfloat16"
    )
    assert tiles == Tiles(128, 256, stages=3)
    x_md, dy_mf, rows_g = (own.shape for own in arguments)
    assert x_md[0] == dy_mf[0] == max_aligned_rows(65536, 64, 128)
    assert (x_md[1], dy_mf[1], rows_g) == (2048, 1024, (64,))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--tiles", "stages"], "'stages' must be field=value"),
        (["--tiles", "wings=2"], "'wings=2' must be field=value"),
        (["--passes", "backward"], "none of swiglu, forward, swiglu_dgrad"),
        (["--target", "h300"], "no target 'h300'"),
    ],
)
def test_bad_input_is_one_line(words, why, capsys, monkeypatch):
    monkeypatch.setattr("tools.compiled.kernel_code.set_up", lambda: None)
    assert tool.main(words) == 2
    assert why in capsys.readouterr().err


def test_tiles_that_do_not_exist_are_refused_in_their_row():
    def make():
        return kernel_cases.product("olmoe_1b_7b", "wgrad", {"stages": 1}, "bfloat16")

    (row,) = tool.records("wgrad", "olmoe_1b_7b", make, target.load("h100"))
    assert "stages=1 must be at least 2" in row["refused"]


@pytest.mark.long
@pytest.mark.aot
def test_kernels_compile_to_the_golden_figures():
    """tests/support/golden_kernel_code.py has the command that writes the file."""
    command = [sys.executable, str(ROOT / "tools" / "kernel_code.py"), "--others=all"]
    names = ("XLA_FLAGS", "PJRT_NPROC")
    ended = subprocess.run(
        [*command, "--json"],
        env={key: value for key, value in os.environ.items() if key not in names},
        capture_output=True,
        text=True,
        timeout=LIMIT_SEC,
        check=True,
    )
    record = json.loads(ended.stdout.rstrip().rpartition("\n")[2])
    assert golden_text(record) == GOLDEN.read_text()
