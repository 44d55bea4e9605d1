"""Runs that start from a published folder: on one process and on two, without the
folder later, and a fine-tuning from beginning to end."""

import json
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from moejax.config import Data
from moejax.interop.companions import read_text_ids
from moejax.interop.published import open_model, write_model
from tests.support.close import assert_close
from tests.support.published_model import NUM_BYTES, write_published
from tests.support.run_main import (
    ROOT,
    checkpoint_record,
    command,
    environment,
    listing,
    metric_lines,
    run,
)
from tests.support.workers import run_workers
from tools import hf
from tools.published.export import trained_token_ids
from train import cli, evaluate, generate
from train.checkpoint.load import find_checkpoints
from train.data.tokenizer import load_tokenizer
from train.main import main

GIN = ROOT / "tests" / "support" / "from_hf.gin"
FINETUNE = ROOT / "configs" / "finetune_cpu.gin"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder of a tiny published model."""
    return write_published(tmp_path_factory.mktemp("published") / "tiny")


def bytes_read(text):
    """Return the bytes that the lines about reading count."""
    found = re.findall(r"^read ([\d,]+) bytes of \S+ ", text, re.MULTILINE)
    return [int(number.replace(",", "")) for number in found]


def call(program, *words):
    """Run a program of train/ or tools/ in a process of its own; return its record."""
    words = [sys.executable, str(ROOT / program), *map(str, words), "--json"]
    ended = subprocess.run(
        words, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


BAD = {
    "no folder": ([], "{no}", "has no config.json"),
    "no tensors": ([], "{bare}", "has neither model.safetensors"),
    "a missing shard": ([], "{cut}", "files are missing"),
    "other tensors": ([], "{other}", "they belong to different models"),
    "a binding that disagrees": (["Moe.top_k = 1"], "{hf}", "says 2: remove the"),
    "a mesh that does not fit": (
        ["Mesh.expert = 3"], "{hf}", "num_experts=8 must be divisible",
    ),
    "no tokenizer": ([], "{mute}", "has no tokenizer.json: copy it there"),
    "a tokenizer that does not fit": (
        ["Data.tokenizer = '{bpe}'"], "{hf}", "ids, but Model.vocab_size=256",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_writes_nothing(case, published, tmp_path, capfd):
    params, folder, message = BAD[case]
    paths = make_bad_folders(published, tmp_path)
    source = f"Model.from_hf = '{folder.format(**paths)}'"
    before = listing(tmp_path)
    params = [param.format(**paths) for param in params]
    words = command(tmp_path / "run", source, *params, gin_file=GIN)[2:]
    assert main(words) == 2
    text = capfd.readouterr()
    record = json.loads(text.out.splitlines()[-1])
    assert message in record["error"]
    assert text.err.splitlines()[-1] == f"error: {record['error']}"
    assert listing(tmp_path) == before


def make_bad_folders(published, path):
    """Write folders with a fault each; return their paths by name, and that of a
    tokenizer of more ids."""
    from tests.support.data_files import write_bpe

    names = ("bare", "cut", "other")
    paths = {"hf": published, "no": path / "no"} | {name: path / name for name in names}
    paths["bare"].mkdir()
    shutil.copy(published / "config.json", paths["bare"])
    write_published(paths["cut"], max_shard_bytes=100_000)
    next(paths["cut"].glob("model-00002*")).unlink()
    shutil.copytree(published, paths["other"])
    config = paths["other"] / "config.json"
    record = json.loads(config.read_text())
    config.write_text(json.dumps(record | {"moe_intermediate_size": 64}))
    paths["mute"] = path / "mute"
    shutil.copytree(published, paths["mute"])
    (paths["mute"] / "tokenizer.json").unlink()
    return paths | {"bpe": write_bpe(path / "bpe.json")}


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


def test_damaged_arrays_do_not_become_random_parameters(imported, tmp_path, capfd):
    """That the arrays are damaged shows when they are read; nothing is compiled."""
    run_dir = tmp_path / "run"
    shutil.copytree(imported, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "0" / "state")
    for params, message in (
        ([], ORIGIN), ([f"Model.from_hf = '{tmp_path / 'no'}'"], "has no config.json"),
    ):  # fmt: skip
        words = command(run_dir, *params, gin_file=run_dir / "config.gin")[2:]
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


def test_a_home_directory_is_expanded(published, monkeypatch, capfd):
    monkeypatch.setenv("HOME", str(published.parent))
    assert evaluate.parse(["~/tiny"]).run_dir == published
    assert generate.parse(["~/tiny"]).run_dir == published
    assert hf.main(["check", "~/tiny", "--headers_only"]) == 0


def test_a_dry_run_needs_config_json_alone(published, tmp_path, capfd):
    shutil.copy(published / "config.json", tmp_path)
    source, run_dir = f"Model.from_hf = '{tmp_path}'", tmp_path / "run"
    words = command(run_dir, source, flags=["--dry_run"], gin_file=GIN)[2:]
    assert main(words) == 0
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert record["params"]["total"] == NUM_BYTES // 4
    assert not run_dir.exists()


@pytest.mark.parametrize("program", [evaluate, generate], ids=lambda p: p.__name__)
def test_programs_refuse_what_they_cannot_read(program, published, tmp_path, capfd):
    """A folder without tokenizer, or without text to evaluate, is one line, and no
    tensor is read."""
    shutil.copy(published / "config.json", tmp_path)
    files = ["--files", str(GIN)] if program is evaluate else []
    assert program.main([str(tmp_path), *files]) == 2
    assert "has no tokenizer.json: copy it there" in capfd.readouterr().err
    assert program.main([str(published), *files, "--step=1"]) == 2
    assert "leave --step out" in capfd.readouterr().err
    assert program.main([str(tmp_path / "no"), *files]) == 2
    assert "no checkpoints, and no config.json" in capfd.readouterr().err
    assert program.main([str(published), *files, "--gin_param=Moe.top_k = 1"]) == 2
    assert "depend on this field" in capfd.readouterr().err
    if program is evaluate:
        assert evaluate.main([str(published)]) == 2
        assert "name a text with --files" in capfd.readouterr().err


def test_a_text_ends_at_each_id_of_the_folder(published):
    """The ids are the folder's and the separator; a run that keeps a copy has them
    too."""
    tokenizer = load_tokenizer(str(published / "tokenizer.json"), 7)
    for folder, ids in ((published, {0, 3, 7}), (None, {7})):
        loaded = SimpleNamespace(published=folder)
        assert cli.end_ids(loaded, tokenizer) == ids
    other = load_tokenizer(str(published / "tokenizer.json"), 7, 5)
    assert cli.end_ids(SimpleNamespace(published=None), other) == {5, 7}


def set_ids(folder, **ids):
    """Replace the ids in a folder's generation_config.json; config.json has none."""
    (folder / "generation_config.json").write_text(json.dumps(ids))


def test_documents_end_as_the_folder_says(published, tmp_path, capfd):
    """A fine-tuned model ends a text with the folder's eos, not with the bos of the
    next one, and the export names what was trained."""
    folder, run_dir = tmp_path / "folder", tmp_path / "run"
    shutil.copytree(published, folder)
    set_ids(folder, bos_token_id=2, eos_token_id=3)
    corpus = tmp_path / "texts.jsonl"
    corpus.write_text('{"text": "a cat"}\n{"text": "a dog"}\n' * 600)
    source = f"Model.from_hf = '{folder}'", f"Data.corpus = '{corpus}'"
    steps = "Train.num_steps = 80", "Train.eval_every_steps = 80"
    ended = run(run_dir, *source, *steps, gin_file=GIN)
    assert ended.code == 0, ended.err
    assert "note: " not in ended.out
    ids, path = tmp_path / "ids.npy", tmp_path / "logits.npy"
    np.save(ids, np.array([[2, *b"a cat"], [2, *b"a dog"]]))
    mesh = "--gin_param=Mesh.data = 2", "--gin_param=Mesh.expert = 4"
    call("tools/hf.py", "logits", run_dir, "--ids", ids, "--out", path, *mesh)
    end_bv = np.load(path)[:, -1].astype(np.float64)
    chance_bv = np.exp(end_bv) / np.exp(end_bv).sum(axis=-1, keepdims=True)
    assert (chance_bv[:, 3] > 0.9).all()
    assert (chance_bv[:, 2] < 0.01).all()
    assert hf.main(["export", str(run_dir), "--out", str(tmp_path / "as it was")]) == 0
    assert read_text_ids(tmp_path / "as it was") == (2, (3,))

    # A bound token that the folder does not name is said at the start, and exported.
    bound = "Data.end = 4", "Train.num_steps = 1", "Checkpoint.every_steps = 1"
    ended = run(tmp_path / "other", *source, *bound, gin_file=GIN)
    assert "begin with token 2 (Data.separator) and end with 4 (Data.end" in ended.out
    out = tmp_path / "out"
    capfd.readouterr()
    assert hf.main(["export", str(tmp_path / "other"), "--out", str(out)]) == 0
    assert "begin with token 2 and to end with 4" in capfd.readouterr().out
    for name in ("config.json", "generation_config.json"):
        written = json.loads((out / name).read_text())
        assert written["eos_token_id"] == 4
    assert read_text_ids(out) == (2, (4,))
    name = str(folder / "tokenizer.json")
    other = Data(tokenizer=name, separator=7, end=3)
    assert trained_token_ids(folder, other) == {"bos_token_id": 7}
    assert trained_token_ids(None, other) == {"bos_token_id": 7, "eos_token_id": 3}


@pytest.mark.long
def test_two_processes_read_their_shares(published, tmp_path):
    """Each process reads what its devices hold, together hardly more than the whole,
    and the run is that of one process."""
    source = f"Model.from_hf = '{published}'"
    one, two = tmp_path / "one", tmp_path / "two"
    mesh = "Mesh.data = 1", "Mesh.expert = 8"
    ended = run(one, source, *mesh, gin_file=GIN)
    assert ended.code == 0, ended.err
    assert bytes_read(ended.out) == [NUM_BYTES]
    ended = run_workers(two, 2, source, *mesh, gin_file=GIN)
    assert ended.code == 0, ended.err
    texts = [ended.out, (two / "logs" / "process-1.log").read_text()]
    counts = [bytes_read(text)[0] for text in texts]
    assert all("for the devices of this process" in text for text in texts)
    assert all(NUM_BYTES / 2 <= count < 0.6 * NUM_BYTES for count in counts), counts
    for ours, theirs in zip(metric_lines(one), metric_lines(two), strict=True):
        assert ours.keys() == theirs.keys()
        for name in {"loss", "grad_norm", "eval_loss"} & ours.keys():
            assert_close(np.float32(ours[name]), np.float32(theirs[name]))
    arrays = [checkpoint_record(path, 4)["arrays"] for path in (one, two)]
    assert arrays[0].keys() == arrays[1].keys()


@pytest.mark.long
def test_a_run_needs_the_folder_at_its_start_alone(published, tmp_path):
    """A run from a folder resumes, generates, evaluates and exports without it, and an
    imported run is the same run."""
    folder, run_dir = tmp_path / "folder", tmp_path / "run"
    shutil.copytree(published, folder)
    source = f"Model.from_hf = '{folder}'"
    first = run(run_dir, source, "Train.num_steps = 2", gin_file=GIN)
    assert first.code == 0, first.err
    imported = tmp_path / "imported"
    call("tools/hf.py", "import", folder, "--out", imported, "--gin_file", GIN)
    shutil.rmtree(folder)
    whole = run(run_dir, "Train.num_steps = 4", gin_file=run_dir / "config.gin")
    assert whole.code == 0, whole.err
    assert "resumed at step 2" in whole.out
    assert not bytes_read(whole.out)
    other = run(imported, gin_file=imported / "config.gin")
    assert other.code == 0, other.err
    assert "resumed at step 0" in other.out
    assert other.record["digest"] == whole.record["digest"]
    again = run(run_dir, source, gin_file=GIN)
    assert "own config.gin" in again.record["error"]
    assert call("train/generate.py", run_dir, "--max_tokens=4")["step"] == 4
    assert call("train/evaluate.py", run_dir)["step"] == 4
    assert call("tools/hf.py", "export", run_dir, "--out", folder)["step"] == 4
    assert call("tools/hf.py", "check", folder)["family"] == "qwen3_moe"


@pytest.mark.long
def test_a_fine_tuning_from_beginning_to_end(published, tmp_path):
    """docs/finetune.md: 50 steps on a text of the user's with a policy and swaps; the
    loss falls, and the exported folder computes what the run does."""
    run_dir, out = tmp_path / "run", tmp_path / "out"
    text = ROOT / "docs" / "house.md"
    words = f"Model.from_hf = '{published}'", f"Data.corpus = '{ROOT}/docs/*.md'"
    before = call("train/evaluate.py", published, "--files", text)
    ended = run(run_dir, *words, gin_file=FINETUNE)
    assert ended.code == 0, ended.err
    assert re.search(r"^step \d+  adopted ", ended.out, re.MULTILINE)
    assert re.search(r"^balancing +flexmoe: [1-9]\d* swaps?,", ended.out, re.MULTILINE)
    losses = [line["loss"] for line in metric_lines(run_dir) if "loss" in line]
    assert len(losses) == 50
    assert np.mean(losses[-5:]) < losses[0] - 1
    after = call("train/evaluate.py", run_dir, "--files", text)
    assert after["loss"] < before["loss"] - 1
    assert call("train/generate.py", run_dir, "--prompt=The ", "--max_tokens=8")[
        "texts"
    ]
    call("tools/hf.py", "export", run_dir, "--out", out)
    ids = tmp_path / "ids.npy"
    np.save(ids, np.arange(64).reshape(2, 32))
    logits = []
    for name, source in (("run", run_dir), ("folder", out)):
        path = tmp_path / f"{name}.npy"
        call("tools/hf.py", "logits", source, "--ids", ids, "--out", path)
        logits.append(np.load(path))
    assert np.abs(logits[0] - logits[1]).max() < 1e-5
