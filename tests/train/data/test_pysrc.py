"""The corpus pysrc: its text, order and windows, and errors for changed packages."""

import hashlib
import logging

import numpy as np
import pytest

from moejax.config import Data
from train import data
from train.data import pysrc
from train.data.token_streams import read_tokens

SHA = "a83660757e7b4b65f233f5fdaabaeb449d48bbf6ead37e3de28fc4297f1a996e"
SMALL = Data(seq_len=16, held_out_every=2)


@pytest.fixture(scope="module")
def corpus():
    return data.load_corpus(Data(), 256)


def read_text(stream):
    return read_tokens(stream, [0], stream.num_tokens)[0].astype(np.uint8).tobytes()


def split_texts(corpus):
    (source,) = corpus.sources
    return read_text(source.train), read_text(source.held_out)


def make_package(folder, name, version, files):
    """Write a distribution with its RECORD as installed, and a file not in RECORD."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))
    (folder / name / "stray.py").write_text("not in RECORD")


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Replace the packages of pysrc by two small ones; return their folder."""
    pad = b"\n" * 40
    alpha = {"alpha/b.py": b"b = 2" + pad, "alpha/a.py": b"a = 1" + pad}
    beta = {
        "beta/__init__.py": b"",
        "beta/c.py": b"b = 2" + pad,
        "beta/d.py": b"c = 3" + pad,
        "beta/c.pyc": b"\0",
    }
    make_package(tmp_path, "alpha", "1.0", alpha)
    make_package(tmp_path, "beta", "2.0", beta)
    monkeypatch.syspath_prepend(tmp_path)
    sha = {
        name: pysrc.sha256_sum(
            {p: t for p, t in sorted(files.items()) if p.endswith(".py")}
        )
        for name, files in {"alpha": alpha, "beta": beta}.items()
    }
    pinned = {"alpha": ("1.0", sha["alpha"]), "beta": ("2.0", sha["beta"])}
    monkeypatch.setattr(pysrc, "PINNED", pinned)
    return tmp_path


def test_pysrc_is_the_documented_text(corpus):
    assert (corpus.name, corpus.sha256) == ("pysrc", SHA)
    assert corpus.num_train_tokens == 20_267_678
    assert corpus.num_held_out_tokens == 336_938
    train, held_out = (
        hashlib.sha256(text).hexdigest()[:16] for text in split_texts(corpus)
    )
    assert (train, held_out) == ("817b789493fb0208", "3c95227627f52498")


def test_order_is_by_path_and_listed_distinct_sources_are_kept(packages):
    pad = b"\n" * 40
    corpus = data.load_corpus(SMALL, 256)
    train, held_out = split_texts(corpus)
    assert train == b"a = 1" + pad + b"\0" + b"c = 3" + pad + b"\0"
    assert held_out == b"b = 2" + pad + b"\0"
    assert corpus.sources[0].train.start_d.tolist() == [0, 45, len(train) - 1]


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("alpha/a.py", b"a = 2", r"\.py files of alpha==1\.0 are not those .*reinst"),
        ("beta/c.py", b"", r"\.py files of beta==2\.0 are not those .*reinstall"),
        ("alpha/a.py", None, r"\.py files of alpha==1\.0 are not those .*reinstall"),
        ("beta-2.0.dist-info/RECORD", None, r"beta lists no \.py files, .*: reinstall"),
    ],
)
def test_a_changed_package_is_named(packages, path, text, message):
    if text is None:
        (packages / path).unlink()
    else:
        (packages / path).write_bytes(text)
    with pytest.raises(ValueError, match=message):
        data.load_corpus(SMALL, 256)


def test_another_version_is_one_warning_and_another_sha(packages, monkeypatch, caplog):
    expected = data.load_corpus(SMALL, 256)
    assert not caplog.records
    (packages / "alpha" / "a.py").write_bytes(b"a = 3" + b"\n" * 40)
    pinned = pysrc.PINNED | {"alpha": ("0.9", pysrc.PINNED["alpha"][1])}
    monkeypatch.setattr(pysrc, "PINNED", pinned)
    with caplog.at_level(logging.WARNING):
        corpus = data.load_corpus(SMALL, 256)
    (record,) = caplog.records
    assert record.getMessage().endswith(": alpha is 1.0, not 0.9")
    assert "\n" not in record.getMessage()
    assert corpus.sha256 != expected.sha256


def test_a_nul_in_a_source_is_refused(packages, monkeypatch):
    (packages / "alpha" / "a.py").write_bytes(b"\0")
    sha = pysrc.sha256_sum(pysrc.read_package("alpha"))
    monkeypatch.setattr(pysrc, "PINNED", pysrc.PINNED | {"alpha": ("1.0", sha)})
    with pytest.raises(AssertionError, match="0x00"):
        data.load_corpus(SMALL, 256)


def test_windows_stay_where_they_are(corpus):
    """A library version that shuffles differently would change resumed runs."""
    batches = data.TrainBatches(corpus, Data(), batch_size=4)
    rows_bt = np.concatenate(
        [batches.rows(step, 0, 4).token_bt for step in (0, 30_000)]
    )
    text_b = np.frombuffer(split_texts(corpus)[0], np.uint8)
    starts = [9_314_673, 20_248_177, 4_313_713, 7_882_097]
    expected_bt = [text_b[start : start + 257] for start in starts]
    np.testing.assert_array_equal(rows_bt[:4], expected_bt)
    digest = hashlib.sha256(rows_bt.astype("<i4").tobytes()).hexdigest()
    assert digest == "21a1e8745e7cb970d7076478242241b7d6ee874f293855fe4ce2d737dc771b4d"


def test_another_separator_is_refused():
    with pytest.raises(ValueError, match=r"'pysrc' is bytes with 0x00 .* separator 1:"):
        data.load_corpus(Data(separator=1), 256)
