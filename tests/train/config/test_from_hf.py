"""Model.from_hf: config.json decides the fields of the model, and a binding that
disagrees is one line."""

import json
import shutil

import pytest

from moejax.interop.companions import read_companions, read_text_ids
from tests.support.published_model import CONFIG, write_published
from train.checkpoint.load import MAX_WINDOW, find_folder
from train.config.from_hf import with_kept_tokenizer
from train.config.gin_reader import ConfigError, load, render


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder of a tiny published model."""
    return write_published(tmp_path_factory.mktemp("published") / "tiny")


def from_hf(folder, *params):
    """Return the configuration of a run that starts from a folder."""
    return load([], [f"Model.from_hf = '{folder}'", *params])


def test_config_json_decides_the_model(published):
    cfg = from_hf(published, "Model.remat = 'full'", "Router.balance_loss = 0.5")
    assert cfg.moe == CONFIG.moe
    for name in ("vocab_size", "d_model", "num_layers", "head_dim", "qk_norm"):
        assert getattr(cfg.model, name) == getattr(CONFIG.model, name)
    assert (cfg.model.remat, cfg.router.balance_loss) == ("full", 0.5)
    assert cfg.data.tokenizer == str(published / "tokenizer.json")
    assert (cfg.data.separator, cfg.data.end) == (0, 0)
    cfg = from_hf(published, "Data.separator = 7")
    assert (cfg.data.separator, cfg.data.end) == (7, 0)
    cfg = from_hf(published, "Data.tokenizer = 'bytes'", "Data.separator = 7")
    assert (cfg.data.tokenizer, cfg.data.separator) == ("bytes", 7)


@pytest.mark.parametrize(
    ("config", "generation", "start", "ends", "end"),
    [
        ({"eos_token_id": 2}, None, 2, (2,), 2),
        ({"bos_token_id": 1, "eos_token_id": 2}, {"eos_token_id": [4, 5]},
         1, (4, 5), 4),
        ({"bos_token_id": 1, "eos_token_id": [2, 1]}, None, 1, (2, 1), 2),
        ({"text_config": {"bos_token_id": 7}}, {"eos_token_id": None}, 7, (), None),
        ({"eos_token_id": None}, None, None, (), None),
    ],
)  # fmt: skip
def test_ids_around_texts(tmp_path, config, generation, start, ends, end):
    """generation_config.json wins over config.json, and a text begins with bos if there
    is one. It ends with the first eos."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_text_ids(tmp_path) == (start, ends)
    assert read_text_ids(tmp_path).end == end


@pytest.mark.parametrize("wrong", ["2", -1, [1, None], 2.5, True, 2**40])
def test_ids_that_are_none_are_one_line(tmp_path, wrong):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": wrong}))
    with pytest.raises(ValueError, match=r"eos_token_id is .*, which is no id of a"):
        read_text_ids(tmp_path)


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json"]
)
def test_no_file_may_link_out_of_the_folder(name, published, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(published, folder)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    readers = [from_hf, find_folder]
    if name == "tokenizer.json":
        readers.append(read_companions)
    for read in readers:
        with pytest.raises(ValueError, match="is a link that leaves the folder"):
            read(folder)


def test_the_cache_of_huggingface_hub_is_read(published, tmp_path):
    folder, blobs = tmp_path / "snapshots" / "1a2b", tmp_path / "blobs"
    shutil.copytree(published, blobs)
    folder.mkdir(parents=True)
    for path in blobs.iterdir():
        (folder / path.name).symlink_to(f"../../blobs/{path.name}")
    assert from_hf(folder).data.tokenizer == str(folder / "tokenizer.json")
    assert find_folder(folder).cfg.data.tokenizer == str(folder / "tokenizer.json")


@pytest.mark.parametrize(
    ("length", "window"), [(None, MAX_WINDOW), (2**20, MAX_WINDOW), (96, 96)]
)
def test_windows_of_an_evaluation(length, window, published, tmp_path):
    record = json.loads((published / "config.json").read_text())
    record["max_position_embeddings"] = length
    (tmp_path / "config.json").write_text(json.dumps(record))
    assert find_folder(tmp_path).cfg.data.seq_len == window


def test_only_a_tokenizer_that_the_run_recorded_is_replaced(published, tmp_path):
    folder, lines = tmp_path / "gone", []
    (tmp_path / "hf").mkdir()
    kept = tmp_path / "hf" / "tokenizer.json"
    shutil.copy(published / "tokenizer.json", kept)
    shutil.copytree(published, folder)
    cfg = from_hf(folder)
    name = cfg.data.tokenizer
    assert with_kept_tokenizer(cfg, tmp_path, name, lines.append) is cfg
    shutil.rmtree(folder)
    other = load([], ["Data.tokenizer = 'typo.json'"])
    assert with_kept_tokenizer(other, tmp_path, name, lines.append) is other
    assert not lines
    recorded = load([], [f"Data.tokenizer = '{name}'"])
    for given, record in ((cfg, "bytes"), (recorded, name)):
        changed = with_kept_tokenizer(given, tmp_path, record, lines.append)
        assert changed.data.tokenizer == str(kept)
        line = f"{name} is gone: the tokenizer is the run's own copy, {kept}"
        assert lines.pop() == line


def test_a_relative_folder_without_tensors_will_do(published, tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    shutil.copy(published / "config.json", tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    cfg = from_hf("tiny")
    assert (cfg.moe, cfg.model.from_hf) == (CONFIG.moe, "tiny")
    assert cfg.data.tokenizer == "tiny/tokenizer.json"


def test_what_is_rendered_reads_back_without_the_folder(published, tmp_path):
    folder = tmp_path / "moved"
    shutil.copytree(published, folder)
    cfg = from_hf(folder)
    text = tmp_path / "all.gin"
    text.write_text(render(cfg))
    assert load([text]) == cfg
    shutil.rmtree(folder)
    assert load([text]) == cfg
    changed = tmp_path / "changed.gin"
    changed.write_text(render(cfg, only_changed=True))
    with pytest.raises(ConfigError, match=r"there is no folder .* own config.gin"):
        load([changed])


def test_equal_bindings_are_fine_and_others_are_refused(published):
    assert from_hf(published, "Moe.top_k = 2").moe.top_k == 2
    with pytest.raises(ConfigError) as refused:
        from_hf(published, "Moe.top_k = 3")
    line = str(refused.value)
    assert line.startswith("--gin_param 'Moe.top_k = 3': Moe.top_k = 3, and the config")
    assert line.endswith("says 2: remove the binding")
    assert "\n" not in line


def test_a_rule_that_the_folder_breaks_names_it(published):
    with pytest.raises(ConfigError, match=r"num_experts=8 must be divisible.*config"):
        from_hf(published, "Mesh.expert = 3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2", "architectures": None}, "gpt2"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers"),
        (None, "no config.json"),
        ("[]", "must be an object"),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_line(published, tmp_path, change, message):
    if isinstance(change, dict):
        record = json.loads((published / "config.json").read_text()) | change
        (tmp_path / "config.json").write_text(json.dumps(record))
    elif change:
        (tmp_path / "config.json").write_text(change)
    with pytest.raises(ConfigError, match=message) as refused:
        from_hf(tmp_path)
    assert str(refused.value).startswith("--gin_param \"Model.from_hf = '")
