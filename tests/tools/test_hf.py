"""tools/hf.py: each command does what it says, and bad input is one line after which
nothing is written."""

import json
import shutil

import numpy as np
import pytest

from moejax.interop.companions import read_text_ids
from moejax.interop.published import open_model
from tests.support.published_model import NUM_BYTES, write_published
from tests.support.run_main import listing
from tests.support.saved_run import save_run
from tools import hf

EIGHT = ("--gin_param=Mesh.expert = 8", "--gin_param=Train.num_simulated_devices = 8")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a tiny published model."""
    return write_published(tmp_path_factory.mktemp("published") / "tiny")


@pytest.fixture(scope="module")
def run_dir(tiny, tmp_path_factory):
    """The run that `import` makes of it."""
    path = tmp_path_factory.mktemp("runs") / "run"
    assert hf.main(["import", str(tiny), "--out", str(path), *EIGHT]) == 0
    return path


def call(capfd, *words):
    """Run a command; return its exit code, its record and its line of error."""
    code = hf.main([*map(str, words), "--json"])
    text = capfd.readouterr()
    return code, json.loads(text.out.splitlines()[-1]), text.err


def test_check(tiny, capfd):
    code, record, err = call(capfd, "check", tiny)
    assert (code, err) == (0, "")
    assert (record["family"], record["num_files"]) == ("qwen3_moe", 1)
    assert record["num_bytes"] == NUM_BYTES == 4 * record["params"]
    assert record["active_params"] < record["params"]


def test_check_refuses_values_that_are_not_finite(tmp_path, capfd):
    folder = write_published(tmp_path / "bad")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    path.write_bytes(data)
    code, record, err = call(capfd, "check", folder)
    assert code == record["exit_code"] == 2
    assert "1 values that are not finite" in record["error"]
    assert err.count("\n") == 1
    assert call(capfd, "check", folder, "--headers_only")[0] == 0


def test_import_and_export_give_the_folder_back(tiny, run_dir, tmp_path, capfd):
    """Tensors come back bit for bit, from several files too, and the other files as
    they were."""
    assert {path.name for path in run_dir.iterdir()} == {
        "checkpoints", "config.gin", "hf"
    }  # fmt: skip
    out = tmp_path / "out"
    code, record, _ = call(capfd, "export", run_dir, "--out", out)
    assert (code, record["step"], record["dtype"]) == (0, 0, "float32")
    before, after = listing(tiny), listing(out)
    assert before == after
    cut = tmp_path / "cut"
    assert call(capfd, "export", run_dir, "--out", cut, "--max_shard_gb=0.0001")[0] == 0
    assert len(list(cut.glob("model-0*.safetensors"))) > 2
    one = open_model(tiny)
    several = open_model(cut)
    assert one.folder.arrays.keys() == several.folder.arrays.keys()
    for name in one.folder.arrays:
        expected = one.folder.view(name).read()
        np.testing.assert_array_equal(several.folder.view(name).read(), expected)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A folder with a tokenizer that moejax does not read, and its run, on bytes."""
    path = tmp_path_factory.mktemp("foreign")
    folder, run_dir = write_published(path / "published"), path / "a run"
    for name in ("generation_config.json", "tokenizer.json"):
        (folder / name).unlink()
    (folder / "tokenizer.model").write_bytes(b"pieces")
    config = json.loads((folder / "config.json").read_text())
    config |= {"bos_token_id": 0, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    words = ["import", str(folder), "--out", str(run_dir), *EIGHT]
    assert hf.main(words) == 2
    assert hf.main([*words, "--gin_param=Data.tokenizer = 'bytes'"]) == 0
    return folder, run_dir


def test_a_folder_keeps_its_own_tokenizer_and_ids(foreign, tmp_path, capfd):
    """No tokenizer of bytes and no other ids come beside those of a published
    model."""
    out = tmp_path / "out"
    assert call(capfd, "export", foreign[1], "--out", out)[0] == 0
    assert listing(out).keys() == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.model"
    }  # fmt: skip
    assert read_text_ids(out) == (0, (1,))
    ids = json.loads((out / "generation_config.json").read_text())
    assert (ids["bos_token_id"], ids["eos_token_id"]) == (0, 1)


def test_a_tokenizer_of_the_user_is_exported(run_dir, tmp_path, capfd):
    """A tokenizer that the user bound replaces all files of the folder's tokenizer, and
    a line says so."""
    mine, out, copy = tmp_path / "mine.json", tmp_path / "out", tmp_path / "copy"
    shutil.copytree(run_dir, copy)
    (copy / "hf" / "tokenizer_config.json").write_text("{}")
    mine.write_bytes((copy / "hf" / "tokenizer.json").read_bytes() + b"\n")
    words = ["export", str(copy), "--out", str(out)]
    assert hf.main([*words, f"--gin_param=Data.tokenizer = '{mine}'"]) == 0
    assert f"the tokenizer is {mine}, with which" in capfd.readouterr().out
    assert (out / "tokenizer.json").read_bytes() == mine.read_bytes()
    own = json.loads((out / "tokenizer_config.json").read_text())
    assert own == {"tokenizer_class": "PreTrainedTokenizerFast"}
    kept = (out / "generation_config.json").read_bytes()
    assert kept == (copy / "hf" / "generation_config.json").read_bytes()


def test_an_export_in_bfloat16_says_so(run_dir, tmp_path, capfd):
    words = ("export", run_dir, "--out", tmp_path / "out", "--dtype=bfloat16")
    assert call(capfd, *words)[1]["dtype"] == "bfloat16"
    _, record, _ = call(capfd, "check", tmp_path / "out")
    assert list(record["dtypes"]) == ["bfloat16"]


@pytest.mark.long
def test_a_run_from_random_parameters_is_published_too(tmp_path, capfd):
    """A toy run with a correction bias becomes a model of a family that has one, with a
    tokenizer of bytes. tests/train/test_export_of_runs.py compares parameters."""
    params = ("Router.gate_scale = 2.0", "Moe.num_shared_experts = 1")
    out = tmp_path / "out"
    saved = save_run(tmp_path / "saved", *params)
    code, record, err = call(capfd, "export", saved, "--out", out)
    assert (code, record["step"], record["dtype"]) == (0, 7, "bfloat16"), err
    assert (out / "tokenizer.json").is_file()
    assert call(capfd, "check", out)[0] == 0


@pytest.mark.slow
def test_logits_are_those_of_transformers(published, tmp_path, capfd):
    expected = np.load(published / "qwen3_moe" / "expected.npz")
    ids, out = tmp_path / "ids.npy", tmp_path / "logits.npy"
    np.save(ids, expected["input_ids"])
    words = ("logits", published / "qwen3_moe", "--ids", ids, "--out", out)
    assert call(capfd, *words, "--gin_param=Mesh.expert = 1")[0] == 0
    logits_btv = np.load(out)
    assert logits_btv.dtype == np.float32
    assert np.abs(logits_btv - expected["logits"]).max() < 1e-5


BAD = {
    "check: no folder": (["check", "{no}"], "there is no folder"),
    "import: out exists": (
        ["import", "{hf}", "--out", "{run}"], "exists and is not empty",
    ),
    "import: a binding that disagrees": (
        ["import", "{hf}", "--out", "{new}", "--gin_param=Moe.top_k = 1"],
        "Moe.top_k = 1, and the config.json",
    ),
    "export: no checkpoint": (
        ["export", "{empty}", "--out", "{new}"], "has no checkpoints",
    ),
    "export: out exists": (
        ["export", "{run}", "--out", "{hf}"], "exists and is not empty",
    ),
    "export: no such step": (
        ["export", "{run}", "--out", "{new}", "--step=5"], "no checkpoint of step 5",
    ),
    "export: another family": (
        ["export", "{run}", "--out", "{new}", "--family=mixtral"], "qwen3_moe",
    ),
    "export: no bytes": (
        ["export", "{run}", "--out", "{new}", "--max_shard_gb=0"], "must be above 0",
    ),
    "logits: neither": (
        ["logits", "{empty}", "--ids", "{ids}", "--out", "{new}"], "no config.json",
    ),
    "logits: no ids": (
        ["logits", "{hf}", "--ids", "{no}", "--out", "{new}"], "No such file",
    ),
    "logits: text for ids": (
        ["logits", "{hf}", "--ids", "{hf}/config.json", "--out", "{new}"],
        "no .npy file",
    ),
    "logits: floats for ids": (
        ["logits", "{hf}", "--ids", "{floats}", "--out", "{new}"], "give integers",
    ),
    "logits: ids beyond the vocabulary": (
        ["logits", "{hf}", "--ids", "{large}", "--out", "{new}"], "ids 0 to 999",
    ),
    "logits: out exists": (
        ["logits", "{hf}", "--ids", "{ids}", "--out", "{ids}"], "exists",
    ),
    "logits: a step of a folder": (
        ["logits", "{hf}", "--ids", "{ids}", "--out", "{new}", "--step=1"],
        "leave --step out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_writes_nothing(case, tiny, run_dir, tmp_path, capfd):
    words, message = BAD[case]
    arrays = {
        "ids": np.zeros((1, 4), np.int32),
        "floats": np.zeros((1, 4)),
        "large": np.array([[0, 999]]),
    }
    paths = {name: tmp_path / f"{name}.npy" for name in arrays}
    for name, array in arrays.items():
        np.save(paths[name], array)
    (tmp_path / "empty").mkdir()
    paths |= {"empty": tmp_path / "empty", "no": tmp_path / "no"}
    paths |= {"new": tmp_path / "new", "hf": tiny, "run": run_dir}
    before = [listing(path) for path in (tmp_path, tiny.parent, run_dir.parent)]
    code, record, err = call(capfd, *(word.format(**paths) for word in words))
    assert code == record["exit_code"] == 2
    assert message in record["error"]
    assert err == f"error: {record['error']}\n"
    after = [listing(path) for path in (tmp_path, tiny.parent, run_dir.parent)]
    assert before == after
