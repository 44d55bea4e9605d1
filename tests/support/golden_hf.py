"""Tiny published architectures with what transformers computes, as models of ours.

tests/golden/hf has a folder for each, which tests/support/make_golden_hf.py has made.
"""

import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.config import Config, Data, Dispatch, Train
from moejax.interop import fields, tree
from moejax.interop.families import FAMILIES
from moejax.interop.published import open_model
from moejax.interop.views import View, held
from tests.support.plain_model import network

ROOT = pathlib.Path(__file__).resolve().parents[1] / "golden" / "hf"
B, T = 2, 32
"""Rows and tokens of the stored inputs."""


class Case(NamedTuple):
    """A folder as one of our models."""

    cfg: Config
    params: dict
    bias: dict
    """The router's biases."""
    expected: dict[str, np.ndarray]
    """expected.npz of the folder."""


@functools.cache
def case(name: str) -> Case:
    """Return the case of a folder."""
    expected = dict(np.load(ROOT / name / "expected.npz"))
    model = open_model(ROOT / name)
    cfg = make_config(model.architecture.fields)
    params, bias = map(read_all, (model.params, model.router_bias))
    ours = network(cfg)
    for views, arrays in ((ours.params, params), (ours.bias, bias)):
        shapes = [jax.tree.map(np.shape, each) for each in (views, arrays)]
        assert shapes[0] == shapes[1], f"they differ:\n{shapes[0]}\n{shapes[1]}"
    return Case(cfg, params, bias, expected)


def make_config(by_part: dict[str, dict[str, Any]]) -> Config:
    """Return a configuration in float32 of the fields of an architecture."""
    parts = {part: kind(**by_part[part]) for part, kind in fields.PARTS.items()}
    parts["model"] = dataclasses.replace(parts["model"], compute_dtype="float32")
    return Config(
        **parts,
        dispatch=Dispatch(buffer_factor=1e3),
        data=Data(seq_len=T),
        train=Train(batch_size=B, loss_chunk=T),
    )


def read_all(views: dict) -> dict:
    """Return the arrays of a tree of views."""
    return jax.tree.map(View.read, views, is_leaf=lambda leaf: isinstance(leaf, View))


def as_published(name: str, arrays: dict) -> dict[str, np.ndarray]:
    """Return arrays like our parameters, such as their gradients, under the names and
    in the shapes of the folder's file. It leaves out correction biases."""
    model = open_model(ROOT / name)
    family = FAMILIES[model.architecture.family]
    leaves = tree.as_leaves(arrays) | tree.as_leaves(model.router_bias)
    leaves = {
        path: leaf if isinstance(leaf, View) else held(np.asarray(leaf))
        for path, leaf in leaves.items()
    }
    saved = tree.save(family, model.network, leaves)
    return {
        key: view.read()
        for key, view in saved.items()
        if not key.endswith("e_score_correction_bias")
    }
