"""A run's first state from a published folder: its values, each part read once, and all
else as without a folder."""

import shutil

import jax
import numpy as np
import pytest

from moejax.interop.published import open_model
from tests.support.published_model import NUM_BYTES, write_published
from tests.support.run_main import listing
from tools.published.on_devices import as_views
from train.checkpoint.checksum import named_leaves
from train.checkpoint.from_hf import check_folder, keep_companions, read_params
from train.config import gin_reader
from train.job import prepare_model
from train.step.state import init_state, state_from

MESH = ("Mesh.data = 2", "Mesh.expert = 2", "Mesh.tensor = 2")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder of a tiny published model."""
    return write_published(tmp_path_factory.mktemp("published") / "tiny")


def configured(folder, *params):
    """Return the configuration of a run that starts from the folder."""
    return gin_reader.load([], [f"Model.from_hf = '{folder}'", *params])


def test_parameters_are_those_of_the_folder(published):
    """Parameters from a folder lie as `init_state` shards them, and are read once."""
    model = prepare_model(configured(published, *MESH))
    lines = []
    params, bias = read_params(model.run, "owned", lines.append)
    state = state_from(params, bias, model.run, model.optimizer)
    other = init_state(model.run, model.optimizer)
    assert jax.tree.structure(state) == jax.tree.structure(other)
    for ours, leaf in zip(jax.tree.leaves(state), jax.tree.leaves(other), strict=True):
        assert (ours.shape, ours.dtype) == (leaf.shape, leaf.dtype)
        assert ours.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
    for name in ("step", "opt_state", "key", "skipped_in_a_row"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(state, name), getattr(other, name)
        )
    opened = open_model(published)
    for name, view in named_leaves(opened.params).items():
        given = named_leaves(params)[name]
        np.testing.assert_array_equal(given, view.read())
        (held,) = jax.tree.leaves(as_views(given))
        np.testing.assert_array_equal(held.read(), view.read())
    (line,) = lines
    assert line.startswith(f"read {NUM_BYTES:,} bytes of {published} in ")


def test_a_run_keeps_the_files_of_its_own_folder_alone(published, tmp_path):
    """Files of an earlier start go. What is kept has no tensors to start from."""
    kept = tmp_path / "hf"
    kept.mkdir()
    for name in ("config.json", "tokenizer.model", "vocab.json"):
        (kept / name).write_text("old")
    cfg = configured(published)
    assert check_folder(cfg) == check_folder(cfg)
    keep_companions(cfg, tmp_path)
    names = {"config.json", "generation_config.json", "tokenizer.json"}
    assert listing(kept).keys() == names
    assert (kept / "config.json").read_text() != "old"
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor"):
        check_folder(configured(kept))


def test_a_folder_without_tokenizer_is_for_those_who_name_one(published, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(published, folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer.json: copy it there from"):
        check_folder(configured(folder))
    bytes_too = configured(folder, "Data.tokenizer = 'bytes'")
    assert check_folder(bytes_too) == check_folder(configured(published))
