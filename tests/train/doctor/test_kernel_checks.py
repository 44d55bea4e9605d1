"""Test the checks of kernels: what is right passes, and planted faults are found."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import use_abstract_mesh

from moejax.axes import make_mesh
from moejax.kernels import quarantine
from moejax.kernels.grouped_dot import portable
from moejax.resolve.kernels import choose_kernels
from moejax.resolve.resolved import resolve
from tests.support.hopper_traces import H200
from tests.support.planted import plant_hopper, wrong_wgrad
from tests.support.run_main import TOY, corpus
from train.config import gin_reader
from train.doctor import doctor, kernel_check, products
from train.doctor.kernel_check import run_kernels

PLANTED = {
    "swiglu": lambda own, *args: (own(*args)[0], 1.1 * own(*args)[1]),
    "forward": lambda own, x, w, rows: own(x.at[0].set(x[1]), w, rows),
    "swiglu_dgrad": lambda own, *args: (own(*args)[0].at[-1].set(1), own(*args)[1]),
    "dgrad": lambda own, dy, w, rows: own(dy, w, rows).at[-1, 0].set(jnp.nan),
    "wgrad of gate and up": lambda own, *args: own(*args).at[1].set(1e-3),
    "wgrad of down": lambda own, x, dy, rows: own(x, dy, rows.at[0].add(-1)),
}
"""Wrong forms of each product: results of the wrong operands, too large, in padding, in
an empty group, of too few rows."""


@functools.cache
def make_run(*params: str):
    cfg = gin_reader.load([str(TOY)], [f"Data.corpus = '{corpus()}'", *params])
    return resolve(cfg, make_mesh(cfg.mesh))


@pytest.fixture(autouse=True)
def nothing_held():
    yield
    quarantine.release()


def checks_named(run, begin: str):
    found = [c for c in doctor.kernel_checks(run) if c.name.startswith(begin)]
    assert found, begin
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        ("Model.compute_dtype = 'bfloat16'",),
        pytest.param(("Balance.policy = 'micromoe'",), marks=pytest.mark.long),
        pytest.param(("Dispatch.fp8 = 'e5m2'",), marks=pytest.mark.long),
        pytest.param(("Dispatch.align_rows = 64",), marks=pytest.mark.long),
        pytest.param(("Router.training = 'dense'",), marks=pytest.mark.long),
    ],
)
def test_what_is_right_passes(params):
    run = make_run(*params)
    checks = doctor.kernel_checks(run)
    outcomes = run_kernels(checks, jax.local_devices()[:1])
    assert [x for x in outcomes if not x.is_right or x.devices] == []
    names = " ".join(x.name for x in outcomes)
    assert ("water-filling (portable)" in names) == ("micromoe" in str(params))
    assert len(outcomes) == (1 if "dense" in str(params) else len(checks))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "wgrad of gate and up",
        "swiglu_dgrad",
        *(pytest.param(name, marks=pytest.mark.long) for name in PLANTED),
    ],
)
def test_a_wrong_product_is_found(monkeypatch, name):
    own, field = portable.products(None), name.partition(" ")[0]
    wrong = functools.partial(PLANTED[name], getattr(own, field))
    planted = own._replace(**{field: wrong})
    monkeypatch.setattr(products, "usable_products", lambda *_: planted)
    (found,) = run_kernels(
        checks_named(make_run(), f"{name} ("), jax.local_devices()[:1]
    )
    assert not found.is_right
    assert found.devices == (0,)
    assert f"{name} (blocked, 96 rows): error " in str(found)
    assert ", allowed 3e-05, on device 0 (process 0)" in str(found)


def test_a_kernel_that_raises_is_named_and_others_are_judged():
    def fails(case):
        raise NotImplementedError("no such instruction")

    def check(name, measure):
        case = [np.float32(1)]
        return kernel_check.KernelCheck(name, "", 1e-5, measure, [case])

    right = check("right", lambda case: case[0] - 1)
    off = check("off", lambda case: case[0])
    outcomes = run_kernels([right, check("broken", fails), off], jax.devices()[:1])
    assert [x.is_right for x in outcomes] == [True, False, False]
    assert "NotImplementedError: no such instruction" in str(outcomes[1])
    assert outcomes[1].record()["error"] is None


def test_only_what_has_another_form_can_be_replaced(monkeypatch):
    plant_hopper(monkeypatch, wgrad=wrong_wgrad)
    run = make_run("Moe.d_expert = 64")
    subjects = {c.name: c.subject for c in doctor.kernel_checks(run)}
    assert subjects["wgrad of down (hopper, 96 rows)"] == "wgrad"
    assert subjects["dgrad (hopper, 96 rows)"] == "dgrad"
    assert subjects["permutations of rows (xla)"] == ""
    quarantine.hold("wgrad", "first", "planted")
    subjects = {c.name: c.subject for c in doctor.kernel_checks(run)}
    assert subjects["wgrad of down (blocked, 96 rows)"] == ""
    assert subjects["dgrad (hopper, 96 rows)"] == "dgrad"


@pytest.mark.long
@pytest.mark.parametrize("align_rows", [1, 128])
def test_the_checks_lower_for_hopper(align_rows):
    """All kernels of the checks of a run on Hopper GPUs are lowered for CUDA."""
    sizes = ("Model.d_model = 1024", "Moe.d_expert = 256", "Model.head_dim = 64")
    sizes += ("Data.seq_len = 256", f"Dispatch.align_rows = {align_rows}")
    run = make_run("Model.compute_dtype = 'bfloat16'", *sizes)
    with use_abstract_mesh(H200):
        run = dataclasses.replace(run)
        vars(run)["kernels"] = choose_kernels(run.cfg, run.layout)
        checks = doctor.kernel_checks(run)

        def measure(cases):
            return [check.measure(case) for check, case in zip(checks, cases)]

        traced = jax.jit(measure).trace(kernel_check.take_cases(checks, 0))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    names = [check.subject for check in checks]
    passes = ["swiglu", "forward", "swiglu_dgrad", "dgrad", "wgrad", "wgrad"]
    assert names[:6] == passes
    assert names[-2] == "permute"
    assert text.count("mosaic_gpu") >= len(checks)
