"""Test the checks of kernels: each kernel of a run is checked, what is right passes,
and planted faults are found."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import use_abstract_mesh

from moejax.axes import make_mesh
from moejax.kernels import cases
from moejax.resolve.kernels import choose_kernels
from moejax.resolve.resolved import resolve
from tests.support.hopper_traces import H200
from tests.support.planted import plant_product
from tests.support.run_main import TOY, corpus
from tests.support.steps import configure
from train.config import gin_reader
from train.doctor.kernels import kernel_checks, run_kernel

FUSED = ["swiglu", "forward", "swiglu_dgrad", "dgrad", "wgrad", "wgrad"]
UNFUSED = ["forward", "forward", "dgrad", "dgrad", "wgrad", "wgrad"]
REST = ["attention", *cases.MOVES, "weighted_sum"]
KERNELS = {
    "Model.compute_dtype = 'bfloat16'": FUSED + REST,
    "Dispatch.fp8 = 'e5m2'": [f"fp8_{x}" for x in UNFUSED[:4]] + UNFUSED[4:] + REST,
    "Router.training = 'dense'": ["attention"],
    "gpt_oss": [*UNFUSED, "attention", *REST],
    "deepseek": FUSED + REST,
    "llama4": FUSED + REST,
}
"""Kernels of a run, by a binding of its configuration or by a family. GPT-OSS has
biases, sinks and windows, DeepSeek has latent attention, and Llama 4 has chunks."""
PLANTED = {
    "swiglu": lambda own, *args: (own(*args)[0], 1.1 * own(*args)[1]),
    "forward": lambda own, x, w, rows: own(x.at[0].set(x[1]), w, rows),
    "dgrad": lambda own, dy, w, rows: own(dy, w, rows).at[-1, 0].set(jnp.nan),
    "wgrad": lambda own, x, dy, rows: own(x, dy, rows.at[0].add(-1)),
}
"""Wrong forms of products: results that are too large, of the wrong operands, not a
number, of too few rows."""


@functools.cache
def make_run(name: str = "Train.seed = 0"):
    """Return the run of a binding or of a family."""
    if " = " in name:
        cfg = gin_reader.load([str(TOY)], [f"Data.corpus = '{corpus()}'", name])
    else:
        cfg = configure(name, data={"seq_len": 64}, train={"loss_chunk": 64})
    return resolve(cfg, make_mesh(cfg.mesh))


def check_kernel(run, kernel: str, devices):
    """Run the last check of a kernel."""
    *_, check = (x for x in kernel_checks(run) if x.case.kernel == kernel)
    return run_kernel(check, devices)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_checked(name):
    checks = kernel_checks(make_run(name))
    assert [x.case.kernel for x in checks] == KERNELS[name]


@pytest.mark.slow
def test_what_is_right_passes():
    """The last check of each kernel: with biases, sinks and windows."""
    checks = {x.case.kernel: x for x in kernel_checks(make_run("gpt_oss"))}
    devices = jax.local_devices()[:1]
    outcomes = [run_kernel(check, devices) for check in checks.values()]
    assert [x for x in outcomes if not x.is_right or x.devices] == []


@pytest.mark.slow
@pytest.mark.parametrize("which", PLANTED)
def test_a_wrong_product_is_named_with_its_device(monkeypatch, which):
    """One of two devices computes another result than the other."""

    def wrong(own, *args):
        is_wrong, results = jax.lax.axis_index("device") == 1, own(*args)
        pick = functools.partial(jnp.where, is_wrong)
        return jax.tree.map(pick, PLANTED[which](own, *args), results)

    plant_product(monkeypatch, which, wrong)
    found = check_kernel(make_run(), which, jax.local_devices()[4:6])
    assert not found.is_right
    assert found.devices == (5,)
    assert found.name.startswith(f"{which} (blocked, float32 32x")
    assert ", on device 5 (process 0): no option avoids it" in str(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda rule, sinks_h: (rule, 2 * sinks_h),
        lambda rule, sinks_h: (rule._replace(window=4), sinks_h),
    ],
    ids=["other sinks", "another window"],
)
def test_wrong_attention_is_found(monkeypatch, change):
    own = cases.attention

    def wrong(*args, rule, sinks_h, **options):
        rule, sinks_h = change(rule, sinks_h)
        return own(*args, rule=rule, sinks_h=sinks_h, **options)

    monkeypatch.setattr(cases, "attention", wrong)
    found = check_kernel(make_run("gpt_oss"), "attention", jax.local_devices()[:1])
    assert not found.is_right


def test_hopper_kernels_are_checked_with_small_cases():
    """A wide model on H200s: a check of each of its own kernels names the option that
    avoids it. tests/kernels lowers them for CUDA."""
    cfg = gin_reader.load(
        [str(TOY)],
        [
            f"Data.corpus = '{corpus()}'", "Model.compute_dtype = 'bfloat16'",
            "Model.d_model = 7168", "Moe.d_expert = 2048",
        ],
    )  # fmt: skip
    run = resolve(cfg, make_mesh(cfg.mesh))
    layout = dataclasses.replace(run.layout, align_rows=64)
    with use_abstract_mesh(H200):
        run = dataclasses.replace(run, layout=layout)
        vars(run)["kernels"] = choose_kernels(cfg, layout)
        checks = [x for x in kernel_checks(run) if x.implementation == "hopper"]
    assert [x.case.kernel for x in checks] == FUSED + REST[1:]
    assert {x.avoided_by for x in checks} == {"Dispatch.kernels = 'plain'"}
    assert checks[0].name == "swiglu (hopper, bfloat16 2048x1024 rows 128+0)"
