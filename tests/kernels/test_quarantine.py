"""Quarantined kernels: what the device's file says, what a process holds, and what the
choices of kernels make of both."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import use_abstract_mesh

from moejax.kernels import device_file, quarantine
from moejax.kernels.attention.choose import choose_attention
from moejax.kernels.attention.reading import CAUSAL, Inputs
from moejax.kernels.grouped_dot import choose, grouped_dot
from moejax.kernels.grouped_dot.hopper import kernels
from moejax.kernels.permute.choose import choose_permute
from moejax.kernels.tuning import Tiles
from moejax.moe.layer import check_device
from moejax.plan.layout import Layout
from tests.support.hopper_traces import H200

KIND = "NVIDIA H200"
SHAPE = ("bfloat16", 4096, 4096, 1024)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(device_file.FOLDER_VARIABLE, str(tmp_path))
    yield tmp_path
    quarantine.release()


def test_a_file_keeps_quarantines_beside_tiles(folder):
    tiles = {"a bucket": {"rows": 128}}
    device_file.save(
        device_file.path_of(KIND), device_file.empty(KIND) | {"tiles": tiles}
    )
    quarantine.store(KIND, "wgrad", "first", "error 0.3", commit="abc")
    quarantine.store(KIND, "dgrad", "second", "a race")
    record = json.loads((folder / "nvidia_h200.json").read_text())
    assert record["tiles"] == tiles
    assert record["quarantined"]["wgrad"]["commit"] == "abc"
    assert quarantine.find("wgrad", KIND) == ("first", "error 0.3")
    assert quarantine.find("dgrad", KIND) == ("second", "a race")
    assert quarantine.find("forward", KIND) is None
    assert quarantine.find("wgrad", "NVIDIA H100") is None
    assert quarantine.unusable(quarantine.KERNELS, KIND) == {"wgrad": "error 0.3"}


def test_the_worse_of_file_and_process_counts():
    quarantine.store(KIND, "wgrad", "second", "in the file")
    quarantine.hold("wgrad", "first", "in the process")
    quarantine.hold("dgrad", "second", "in the process")
    quarantine.store(KIND, "dgrad", "first", "in the file")
    assert quarantine.find("wgrad", KIND).why == "in the process"
    assert quarantine.find("dgrad", KIND).why == "in the file"
    quarantine.release()
    assert quarantine.find("wgrad", KIND) == ("second", "in the file")


def test_a_pass_falls_back_alone():
    own, blocked = (
        choose.products(name, None, "none") for name in ("hopper", "blocked")
    )
    with use_abstract_mesh(H200):
        before = choose.choose_grouped_dot(*SHAPE)
        assert choose.usable_products("hopper", "none") is own
        quarantine.hold("wgrad", "first", "error 0.3")
        after = choose.choose_grouped_dot(*SHAPE)
        mixed = choose.usable_products("hopper", "none")
        assert choose.usable_products("hopper", "none") is mixed
    assert before == ("hopper", KIND)
    assert after.implementation == "hopper"
    assert after.why.endswith("as they are quarantined: wgrad (error 0.3)")
    assert mixed == own._replace(wgrad=blocked.wgrad)


def test_a_pass_of_fp8_falls_back_alone():
    with use_abstract_mesh(H200):
        quarantine.hold("fp8_forward", "first", "error 0.3")
        quarantine.hold("forward", "first", "does not count")
        own = choose.products("hopper", None, "e4m3")
        mixed = choose.usable_products("hopper", "e4m3")
    blocked = choose.products("blocked", None, "e4m3")
    assert (mixed.forward, mixed.dgrad) == (blocked.forward, own.dgrad)
    assert mixed.swiglu.args == (blocked.forward,)


def test_the_fallback_computes_the_pass(monkeypatch):
    """On a device that seems to be a Hopper the wrong forward kernel is not called."""
    x_md, w_gdf = jnp.ones((128, 64)), jnp.ones((2, 64, 64))
    rows_g = jnp.array([60, 40], jnp.int32)
    expected = grouped_dot(x_md, w_gdf, rows_g)
    called = choose.KernelChoice("hopper", "as if")
    monkeypatch.setattr(
        "moejax.kernels.grouped_dot.vjp.choose_grouped_dot", lambda *a, **k: called
    )
    with pytest.raises(NotImplementedError, match="implementation='blocked'"):
        grouped_dot(x_md, w_gdf, rows_g)
    quarantine.hold("forward", "first", "planted")
    np.testing.assert_array_equal(grouped_dot(x_md, w_gdf, rows_g), expected)


def test_all_passes_together_leave_blocked():
    for which in choose.PASSES_OF_LAYER[False]:
        quarantine.hold(which, "first", "planted")
    with use_abstract_mesh(H200):
        result = choose.choose_grouped_dot(*SHAPE)
        is_fp8 = choose.choose_grouped_dot(*SHAPE, is_fp8=True)
    assert result.implementation == "blocked"
    assert "forward (planted), dgrad (planted), wgrad (planted)" in result.why
    assert is_fp8.implementation == "hopper"


def test_a_declined_shape_is_declined_for_its_own_reason():
    quarantine.hold("wgrad", "first", "planted")
    with use_abstract_mesh(H200):
        result = choose.choose_grouped_dot("float32", *SHAPE[1:])
    assert "planted" not in result.why


def test_permutation_and_attention_take_the_next():
    q_bthi = jax.ShapeDtypeStruct((2, 1024, 8, 128), "bfloat16")
    first_bt = jax.ShapeDtypeStruct((2, 1024), "int32")
    inputs = Inputs(q_bthi, q_bthi, q_bthi, first_bt, jax.ShapeDtypeStruct((), "int32"))
    with use_abstract_mesh(H200):
        assert choose_permute("bfloat16", 4096).implementation == "hopper"
        assert choose_attention(inputs, CAUSAL).implementation == "hopper"
        for kernel in ("permute", "attention"):
            quarantine.hold(kernel, "first", "planted")
        permute = choose_permute("bfloat16", 4096)
        second = choose_attention(inputs, CAUSAL)
        quarantine.hold("attention_cudnn", "first", "planted too")
        last = choose_attention(inputs, CAUSAL)
    assert permute.implementation == "xla"
    assert permute.why.endswith(f"quarantined on {KIND}: planted")
    assert second.implementation == "cudnn"
    assert last.implementation == "blocked"
    assert "planted;" in last.why
    assert last.why.endswith("planted too")


def test_the_fused_split_is_refused():
    quarantine.hold("water_fill", "first", "planted")
    layout = Layout(4, 2, 2, 8, split="water_filling", fused_split=True)
    with pytest.raises(
        NotImplementedError, match=r"planted: use Dispatch\.fused_split"
    ):
        check_device(layout, H200.abstract_device)


def test_only_first_forms_make_a_choice():
    quarantine.hold("wgrad", "second", "planted")
    with use_abstract_mesh(H200):
        assert choose.choose_grouped_dot(*SHAPE) == ("hopper", KIND)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quarantine.hold("wgrads", "first", ""), "kernel='wgrads' is not one"),
        (lambda: quarantine.hold("wgrad", "third", ""), "form='third' is not one of"),
        (lambda: quarantine.find("any", KIND), "kernel='any' is not one of forward"),
    ],
)
def test_unknown_names(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "entry", [{"form": "third", "why": ""}, {"form": "first"}, "text", 7]
)
def test_a_damaged_entry_says_what_to_do(entry):
    record = device_file.empty(KIND) | {"quarantined": {"wgrad": entry}}
    device_file.save(device_file.path_of(KIND), record)
    with pytest.raises(ValueError, match="say form and why of the quarantined wgrad"):
        quarantine.find("wgrad", KIND)


@pytest.mark.parametrize("text", ["{", "[]", '{"tiles": 3}', '{"tiles": {}, "q": 1'])
def test_a_damaged_file_says_what_to_do(text, folder):
    (folder / "nvidia_h200.json").write_text(text)
    with pytest.raises(ValueError, match="must hold tiles by bucket, and does not"):
        quarantine.find("wgrad", KIND)


def test_a_file_that_changes_is_read_again():
    assert quarantine.find("wgrad", KIND) is None
    quarantine.store(KIND, "wgrad", "second", "one")
    assert quarantine.find("wgrad", KIND).why == "one"
    quarantine.store(KIND, "wgrad", "second", "two")
    assert quarantine.find("wgrad", KIND).why == "two"


def test_tiles_lose_their_second_form(monkeypatch):
    """The tiles of the device's file choose a second form, and a quarantine of second
    forms takes it away from this pass alone."""
    second = Tiles(128, 128, halves="turns", math="approx", cluster=2)
    taken = []
    monkeypatch.setattr(kernels, "tiles_for", lambda *bucket: second)
    for name in ("forward", "dgrad"):
        monkeypatch.setattr(kernels, name, lambda *a: taken.append(a[-2]))
    x_md, w_gdf = jnp.ones((128, 64)), jnp.ones((2, 64, 64))
    quarantine.hold("forward", "second", "planted")
    with use_abstract_mesh(H200):
        own = kernels.products()
        own.forward(x_md, w_gdf, jnp.array([60, 40]))
        own.dgrad(x_md, w_gdf, jnp.array([60, 40]))
    assert taken == [second.first_form(), second]
    assert not second.first_form().is_second_form
