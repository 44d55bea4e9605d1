"""The doctor checks what a run with options of published families uses: products that
no activation is fused with, sinks, windows, and the widths of latent attention."""

import functools

import jax
import pytest

from moejax.axes import make_mesh
from moejax.kernels.grouped_dot import portable
from moejax.resolve.resolved import resolve
from tests.support.families import configure
from train.doctor import doctor, other_kernels, products
from train.doctor.kernel_check import run_kernels

FUSED = ["swiglu", "forward", "swiglu_dgrad", "dgrad"]
UNFUSED = ["forward of gate and up", "dgrad of down", "forward", "dgrad"]
EXPECTED = {
    "gpt_oss": [
        *UNFUSED, "wgrad of gate and up", "wgrad of down", "permutations of rows",
        "attention (blocked, sinks, 64 tokens)",
        "attention (blocked, sinks, 64 tokens, a window of 3)",
    ],
    "deepseek": [
        *FUSED, "wgrad of gate and up", "wgrad of down", "permutations of rows",
        "attention (blocked, 64 tokens)",
    ],
}  # fmt: skip
EXPECTED["llama4"] = EXPECTED["deepseek"]


@functools.cache
def make_checks(family: str):
    cfg = configure(family, data={"seq_len": 64}, train={"loss_chunk": 64})
    return doctor.kernel_checks(resolve(cfg, make_mesh(cfg.mesh)))


def run(checks):
    return run_kernels(checks, jax.local_devices()[:1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    ["gpt_oss", *(pytest.param(x, marks=pytest.mark.long) for x in list(EXPECTED)[1:])],
)
def test_what_is_right_passes(family):
    outcomes = run(make_checks(family))
    assert [x for x in outcomes if not x.is_right] == []
    names = [x.name for x in outcomes]
    assert len(names) == len(EXPECTED[family])
    for name, begin in zip(sorted(names), sorted(EXPECTED[family])):
        assert name == begin or name.startswith(f"{begin} (")


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kernel", ["forward", "dgrad", "wgrad"])
def test_a_wrong_product_that_nothing_is_fused_with_is_found(monkeypatch, kernel):
    own = portable.products(None)
    wrong = {kernel: lambda *args: getattr(own, kernel)(*args).at[0, 0].add(1)}
    monkeypatch.setattr(products, "usable_products", lambda *_: own._replace(**wrong))
    outcomes = run(make_checks("gpt_oss"))
    found = {x.name for x in outcomes if not x.is_right}
    assert found == {x.name for x in outcomes if x.name.startswith(kernel)}
    assert len(found) == 2


CHANGES = {
    "other sinks": lambda rule, sinks_h: (rule, 2 * sinks_h),
    "no sinks": lambda rule, sinks_h: (rule, None),
    "another scale": lambda rule, sinks_h: (rule._replace(scale=0.4), sinks_h),
    "another window": lambda rule, sinks_h: (rule._replace(window=4), sinks_h),
}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_wrong_attention_is_found(monkeypatch, name):
    own = other_kernels.attention

    def wrong(*args, rule, sinks_h, **options):
        rule, sinks_h = CHANGES[name](rule, sinks_h)
        return own(*args, rule=rule, sinks_h=sinks_h, **options)

    monkeypatch.setattr(other_kernels, "attention", wrong)
    checks = [x for x in make_checks("gpt_oss") if x.name.startswith("attention")]
    assert [x.is_right for x in run(checks)] == [False, False]
