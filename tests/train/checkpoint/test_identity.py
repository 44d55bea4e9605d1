"""Resuming compares every field of the configuration with the checkpoint's."""

import dataclasses
import json

import pytest

from moejax.config import Config, Dispatch, Optimizer, Train
from moejax.plan.layout import Topology
from train.checkpoint import identity
from train.config.names import PARTS

FIELDS = [
    (part, field.name)
    for part, cls in PARTS.items()
    for field in dataclasses.fields(cls)
    if (part, field.name) != ("train", "run_dir")  # a run may be moved
]
FREE_FIELDS = {
    "model": {
        "attention", "remat", "compute_dtype", "gradient_reduce_dtype", "from_hf",
    },
    "attention": set(),
    "rope": set(),
    "mla": set(),
    "moe": {"halves"},
    "router": {
        "jitter", "balance_loss", "sequence_balance_loss", "z_loss",
        "mutual_information_loss", "training", "bias_rate",
    },
}  # fmt: skip
"""Fields of the network that may change on resume: they say how it is computed, or
what it learns from, and not which function its parameters define."""


@pytest.fixture(autouse=True)
def any_data(monkeypatch):
    """Accept any data: data identities have their own tests (test_corpus.py)."""
    monkeypatch.setattr(identity.data, "check_identity", lambda saved, current: None)


def make_meta(cfg: Config) -> dict:
    config = json.loads(json.dumps(cfg.to_dict()))
    return {"format": identity.FORMAT, "config": config, "data": {}}


def test_every_field_is_compared():
    """A changed field is reported, or refused where the parameters depend on it. One
    that the checkpoint lacks had its default."""
    assert identity.check(make_meta(Config()), Config(), {}) == []
    for part, field in FIELDS:
        meta = make_meta(Config())
        meta["config"][part][field] = "another"
        if field in identity.FIXED_FIELDS.get(part, ()) or field == "compression":
            with pytest.raises(ValueError, match=rf"{part}\.{field}: 'another' saved"):
                identity.check(meta, Config(), {})
        else:
            (line,) = identity.check(meta, Config(), {})
            assert line.startswith(f"{part}.{field}: 'another' saved, ")
        del meta["config"][part][field]
        assert identity.check(meta, Config(), {}) == [], (part, field)


def test_every_field_of_the_network_is_fixed_or_free():
    """A new field must be entered in one of the two lists."""
    for part, free in FREE_FIELDS.items():
        fixed = identity.FIXED_FIELDS[part]
        assert fixed | free == {field for p, field in FIELDS if p == part}
        assert not fixed & free


@pytest.mark.parametrize(
    "changes", [{"format": 1}, {"format": identity.FORMAT + 1}, {}]
)
def test_other_formats_are_refused_in_one_line(changes):
    meta = make_meta(Config())
    del meta["format"]
    with pytest.raises(ValueError, match="this program reads format") as error:
        identity.check(meta | changes, Config(), {})
    assert "\n" not in str(error.value)


def test_each_field_of_the_sharding_of_tracked_experts_is_compared():
    assert identity.has_same_sharding(make_meta(Config()), Config())
    for part, fields in identity.SHARDING_FIELDS.items():
        for field in fields:
            meta = make_meta(Config())
            meta["config"][part][field] = "another"
            assert not identity.has_same_sharding(meta, Config())


def test_compression_is_neither_switched_on_nor_off():
    """The ratio may change: copies of experts are state where there is compression."""
    off, weak, strong = (
        Config(
            dispatch=Dispatch(domain=(2, 1), group="dc_expert", compression=ratio),
            mesh=Topology(dc=2),
        )
        for ratio in (None, 8.0, 50.0)
    )
    for there, here in ((off, weak), (weak, off)):
        with pytest.raises(ValueError, match=r"dispatch\.compression"):
            identity.check(make_meta(there), here, {})
    assert identity.check(make_meta(weak), strong, {})


def test_a_rate_that_changes_on_resume_is_told():
    """A constant run ends in a decay where that begins, or behind it; a longer run of a
    cosine does not go on where the shorter one would have."""

    def trained(decay, num_steps=100):
        optimizer = Optimizer(decay=decay, warmup_steps=5, decay_share=0.2)
        return Config(optimizer=optimizer, train=Train(num_steps=num_steps))

    def line(before, after, step):
        saved = {"config": json.loads(json.dumps(before.to_dict()))}
        return identity.changed_rate(saved, after, step)

    constant, wsd, cosine = map(trained, ("constant", "wsd", "cosine"))
    assert line(constant, wsd, 80) == line(cosine, cosine, 50) == ""
    assert line(constant, wsd, 90).startswith(
        "the learning rate is 0.000364 from here; in the configuration of the "
        "checkpoint it would be 0.001"
    )
    assert line(cosine, trained("cosine", 200), 100)
