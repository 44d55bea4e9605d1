"""Runs that start from a published folder, and go on without it later."""

import json
import os
import re
import shutil
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from moejax.interop.published import open_model, write_model
from moejax.moe.types import Batch, Windows
from tests.support.published_model import NUM_BYTES, write_published
from tests.support.run_main import (
    ROOT,
    command,
    listing,
    run,
)
from tools import hf
from tools.published.export import trained_token_ids
from train import cli, evaluate
from train.checkpoint.from_hf import notes_on_tokens
from train.checkpoint.load import find_checkpoints
from train.config import gin_reader
from train.data.tokenizer import load_tokenizer
from train.job import prepare
from train.main import main

GIN = ROOT / "tests" / "support" / "from_hf.gin"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder of a tiny published model."""
    return write_published(tmp_path_factory.mktemp("published") / "tiny")


@pytest.fixture(scope="module")
def imported(published, tmp_path_factory):
    """A run directory that `import` makes."""
    path = tmp_path_factory.mktemp("runs") / "imported"
    words = ["import", str(published), "--out", str(path), f"--gin_file={GIN}"]
    assert hf.main(words) == 0
    return path


ORIGIN = "came from a published model, and would start from random parameters"
LOST = {
    "no checkpoint": ([], None, ORIGIN),
    "a fresh start": (["--fresh"], None, ORIGIN),
    "a damaged record": ([], "record/metadata", ORIGIN),
    "a folder that is gone": ([], "record/metadata", "has no config.json, and a new"),
}


@pytest.mark.parametrize("case", LOST)
def test_no_published_model_becomes_random_parameters(case, imported, tmp_path, capfd):
    """A run without a whole checkpoint, that is not told where its model is, is one
    line, and nothing is written."""
    flags, damaged, message = LOST[case]
    run_dir = tmp_path / "run"
    shutil.copytree(imported, run_dir)
    if case == "no checkpoint":
        shutil.rmtree(run_dir / "checkpoints")
    if damaged:
        (run_dir / "checkpoints" / "0" / damaged).write_text("{}")
    params = [f"Model.from_hf = '{tmp_path / 'no'}'"] if "gone" in case else []
    before = listing(tmp_path)
    words = command(run_dir, *params, flags=flags, gin_file=run_dir / "config.gin")[2:]
    assert main(words) == 2
    assert message in json.loads(capfd.readouterr().out.splitlines()[-1])["error"]
    assert listing(tmp_path) == before
    if not damaged:
        return
    # That the arrays are damaged shows when they are read; nothing is compiled.
    shutil.rmtree(run_dir / "checkpoints" / "0")
    shutil.copytree(imported / "checkpoints" / "0", run_dir / "checkpoints" / "0")
    shutil.rmtree(run_dir / "checkpoints" / "0" / "state")
    assert main(words) == 2
    assert message in json.loads(capfd.readouterr().out.splitlines()[-1])["error"]


def test_the_tokenizer_of_a_run_that_was_moved(imported, tmp_path, capfd):
    """A run that was moved takes its own copy of the tokenizer; a wrong path that the
    user gives stays what it is."""
    moved, name = tmp_path / "moved", f"{imported}/hf/tokenizer.json"
    imported.rename(moved)
    try:
        found = find_checkpoints(moved)
        other = find_checkpoints(moved, params=["Data.tokenizer = 'typo.json'"])
    finally:
        moved.rename(imported)
    assert found.cfg.data.tokenizer == f"{moved}/hf/tokenizer.json"
    assert other.cfg.data.tokenizer == "typo.json"
    assert capfd.readouterr().err.startswith(f"{name} is gone: the tokenizer is the")


def test_processes_compare_the_tensors_of_a_folder(published, tmp_path):
    """Their names, types and shapes are among the facts, but not their files."""
    cut, narrow, tensors = tmp_path / "cut", tmp_path / "narrow", []
    write_published(cut, max_shard_bytes=100_000)
    opened = open_model(published)
    trees = opened.params, opened.router_bias
    write_model(narrow, opened.network, *trees, dtype="bfloat16")
    for folder in (published, cut, narrow):
        args = evaluate.parse([str(folder), "--files", "a"])
        found = cli.find(folder, None, [])
        tensors.append(cli._facts(args, found)["tensors"])
    assert tensors[0] == tensors[1] != tensors[2]


def test_a_run_needs_the_folder_at_its_start_alone(published, tmp_path, capfd):
    """The start reads each tensor once. Later a start with the run's own configuration,
    and programs that read the run, need no folder."""
    folder, run_dir = tmp_path / "folder", tmp_path / "run"
    shutil.copytree(published, folder)
    params = f"Model.from_hf = '{folder}'", "Train.num_steps = 2"
    ended = run(run_dir, *params, gin_file=GIN)
    assert ended.code == 0, ended.err
    found = re.findall(r"^read ([\d,]+) bytes of ", ended.out, re.MULTILINE)
    assert found == [f"{NUM_BYTES:,}"]
    shutil.rmtree(folder)
    with mock.patch.dict(os.environ):
        assert main(command(run_dir, gin_file=run_dir / "config.gin")[2:]) == 0
    assert " is finished: 2 of 2 steps" in capfd.readouterr().out
    loaded = cli.load(cli.find(run_dir, None, []))
    assert cli.end_ids(loaded, cli.run_tokenizer(loaded)) == {0, 3}
    assert hf.main(["export", str(run_dir), "--out", str(folder)]) == 0
    assert hf.main(["check", str(folder)]) == 0


def test_a_dry_run_needs_config_json_alone(published, tmp_path, capfd):
    shutil.copy(published / "config.json", tmp_path)
    source, run_dir = f"Model.from_hf = '{tmp_path}'", tmp_path / "run"
    words = command(run_dir, source, flags=["--dry_run"], gin_file=GIN)[2:]
    assert main(words) == 0
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert record["params"]["total"] == NUM_BYTES // 4
    assert not run_dir.exists()


def test_a_text_ends_at_each_id_of_the_folder(published):
    """The ids are the folder's and the separator; a run that keeps a copy has them
    too."""
    tokenizer = load_tokenizer(str(published / "tokenizer.json"), 7)
    for folder, ids in ((published, {0, 3, 7}), (None, {7})):
        loaded = SimpleNamespace(published=folder)
        assert cli.end_ids(loaded, tokenizer) == ids
    other = load_tokenizer(str(published / "tokenizer.json"), 7, 5)
    assert cli.end_ids(SimpleNamespace(published=None), other) == {5, 7}


@pytest.mark.parametrize(
    ("params", "start", "end", "num_notes"),
    [
        ((), 2, 3, 0),
        (("Data.end = 4",), 2, 4, 1),
        (("Data.separator = 7", "Data.end = 3"), 7, 3, 1),
    ],
)
def test_documents_begin_and_end_as_the_folder_says(
    published, tmp_path, params, start, end, num_notes
):
    """A bound token that the folder does not name is said, and an export names it.
    config.json has none."""
    folder = shutil.copytree(published, tmp_path / "folder")
    ids = {"bos_token_id": 2, "eos_token_id": 3}
    (folder / "generation_config.json").write_text(json.dumps(ids))
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "a cat"}\n{"text": "a dog"}\n' * 600)
    source = f"Model.from_hf = '{folder}'", f"Data.corpus = '{texts}'"
    cfg = gin_reader.load([GIN], [*source, *params])
    job = prepare(cfg, is_new=True)
    token_bt = np.array([[start, 97, start, 98]])
    windows = Windows(token_bt, np.zeros_like(token_bt))
    batch = Batch.from_windows(windows, job.model.ends)
    assert batch.targets_bt.tolist() == [[97, end, 98]]
    assert len(notes_on_tokens(cfg, job.corpus.tokenizer)) == num_notes
    trained = {"bos_token_id": start, "eos_token_id": end}
    assert trained_token_ids(None, cfg.data) == trained
    changed = {name: x for name, x in trained.items() if x != ids[name]}
    assert trained_token_ids(folder, cfg.data) == changed
