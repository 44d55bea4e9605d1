"""Corpora, batches as pure functions of a step, and what a bad corpus is answered."""

import dataclasses
import hashlib
import itertools
import logging
import subprocess
import sys
from importlib import metadata

import numpy as np
import pytest

from moejax.config import Data
from train import data

PYSRC_SHA = "a83660757e7b4b65f233f5fdaabaeb449d48bbf6ead37e3de28fc4297f1a996e"
SEQ_LEN = 16


@pytest.fixture(scope="module")
def pysrc():
    return data.load_corpus(Data())


@pytest.fixture
def random_corpus():
    """Random bytes: every window of 17 is found by its content."""
    rng = np.random.default_rng(0)
    train_b = rng.integers(0, 256, 1000, np.uint8)
    held_out_b = rng.integers(0, 256, 300, np.uint8)
    return data.Corpus("random", "0" * 64, train_b, held_out_b)


def first_bytes(text_b, rows_bt):
    """Position in the text of each row."""
    windows = np.lib.stride_tricks.sliding_window_view(text_b, rows_bt.shape[1])
    position = {window.tobytes(): start for start, window in enumerate(windows)}
    assert len(position) == len(windows)
    return np.array([position[row.astype(np.uint8).tobytes()] for row in rows_bt])


def make_package(folder, name, version, files):
    """A distribution as an installer leaves it, RECORD and all, with a stray file."""
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
    """Two small packages in place of those of pysrc; returns their folder."""
    pad = b"\n" * 40
    alpha = {"alpha/b.py": b"b = 2" + pad, "alpha/a.py": b"a = 1" + pad}
    beta = {"beta/__init__.py": b"", "beta/c.py": b"b = 2" + pad, "beta/c.pyc": b"\0"}
    make_package(tmp_path, "alpha", "1.0", alpha)
    make_package(tmp_path, "beta", "2.0", beta)
    monkeypatch.syspath_prepend(tmp_path)
    sha = {
        name: data._sha256(
            {p: t for p, t in sorted(files.items()) if p.endswith(".py")}
        )
        for name, files in {"alpha": alpha, "beta": beta}.items()
    }
    pinned = {"alpha": ("1.0", sha["alpha"]), "beta": ("2.0", sha["beta"])}
    monkeypatch.setattr(data, "_PINNED", pinned)
    return tmp_path


SMALL = Data(seq_len=SEQ_LEN, held_out_every=2)


def test_pysrc_is_the_documented_text(pysrc):
    assert (pysrc.name, pysrc.sha256) == ("pysrc", PYSRC_SHA)
    assert (pysrc.train_b.size, pysrc.held_out_b.size) == (20_267_678, 336_938)
    assert pysrc.train_b.dtype == pysrc.held_out_b.dtype == np.uint8


def test_pinned_versions_are_those_of_the_constraints(repo):
    lines = (repo / "constraints.txt").read_text().splitlines()
    assert {f"{p}=={version}" for p, (version, _) in data._PINNED.items()} <= set(lines)


def test_every_pysrc_document_is_on_one_side_once(pysrc):
    train, held_out = (
        text_b.tobytes().removesuffix(b"\0").split(b"\0")
        for text_b in (pysrc.train_b, pysrc.held_out_b)
    )
    listed = (f for package in data._PINNED for f in metadata.files(package))
    installed = {f.locate().read_bytes() for f in listed if f.name.endswith(".py")}
    assert len(train) + len(held_out) == len(installed - {b""})
    assert {*train, *held_out} == installed - {b""}
    assert len(held_out) == (len(train) + len(held_out)) // Data().held_out_every


def test_pysrc_orders_by_path_and_keeps_listed_distinct_sources(packages):
    corpus = data.load_corpus(SMALL)
    assert corpus.train_b.tobytes() == b"a = 1" + b"\n" * 40 + b"\0"
    assert corpus.held_out_b.tobytes() == b"b = 2" + b"\n" * 40 + b"\0"


@pytest.mark.parametrize("package", ["alpha", "beta"])
def test_a_changed_package_is_named(packages, package):
    path = next((packages / package).glob("[bc].py"))
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(
        ValueError, match=rf"\.py files of {package}==\S+ are not.*rein"
    ):
        data.load_corpus(SMALL)


def test_a_missing_source_is_a_change(packages):
    (packages / "alpha" / "a.py").unlink()
    with pytest.raises(ValueError, match=r"files of alpha==1\.0 are not those of the"):
        data.load_corpus(SMALL)


def test_a_package_that_lists_no_sources_is_named(packages):
    (packages / "beta-2.0.dist-info" / "RECORD").unlink()
    with pytest.raises(
        ValueError, match=r"beta lists no \.py files .*: reinstall beta"
    ):
        data.load_corpus(SMALL)


def test_another_version_is_one_warning_and_another_sha(packages, monkeypatch, caplog):
    expected = data.load_corpus(SMALL)
    assert not caplog.records
    (packages / "alpha" / "a.py").write_bytes(b"a = 3" + b"\n" * 40)
    pinned = data._PINNED | {"alpha": ("0.9", data._PINNED["alpha"][1])}
    monkeypatch.setattr(data, "_PINNED", pinned)
    with caplog.at_level(logging.WARNING):
        corpus = data.load_corpus(SMALL)
    (record,) = caplog.records
    assert record.getMessage().endswith(": alpha is 1.0, not 0.9")
    assert "\n" not in record.getMessage()
    assert corpus.sha256 != expected.sha256


def test_a_nul_in_a_source_is_refused(packages, monkeypatch):
    (packages / "alpha" / "a.py").write_bytes(b"\0")
    sha = data._sha256(data._read_package("alpha"))
    monkeypatch.setattr(data, "_PINNED", data._PINNED | {"alpha": ("1.0", sha)})
    with pytest.raises(AssertionError, match="0x00"):
        data.load_corpus(SMALL)


def test_a_file_is_split_at_its_end(tmp_path):
    text = bytes(range(256)) * 4
    (tmp_path / "text.txt").write_bytes(text)
    cfg = Data(corpus=str(tmp_path / "text.txt"), seq_len=SEQ_LEN, held_out_every=10)
    corpus = data.load_corpus(cfg)
    assert (corpus.train_b.size, corpus.held_out_b.size) == (922, 102)
    assert corpus.train_b.tobytes() + corpus.held_out_b.tobytes() == text
    assert corpus.name == "text.txt"
    assert corpus.sha256 == hashlib.sha256(text).hexdigest()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"is no file: give the path of a text file, or 'pysrc'$"),
        (b"", r"is empty: give a file that holds text$"),
        (b"x" * 33, r"has 17 bytes to train on and 16 held out, .* needs 17 in each: "),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path, text, message):
    path = tmp_path / "text.txt"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ValueError, match=message) as error:
        data.load_corpus(dataclasses.replace(SMALL, corpus=str(path)))
    assert f"Data.corpus='{path}'" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_shortest_file_is_one_window_over_and_over(tmp_path):
    text = bytes(range(2 * SEQ_LEN + 2))
    (tmp_path / "text.txt").write_bytes(text)
    cfg = dataclasses.replace(SMALL, corpus=str(tmp_path / "text.txt"))
    corpus = data.load_corpus(cfg)
    expected_bt = [list(text[: SEQ_LEN + 1])] * 3
    batches = data.TrainBatches(corpus, cfg, batch_size=3)
    np.testing.assert_array_equal(batches.rows(7, 0, 3), expected_bt)
    held_out_bt = data.HeldOut(corpus, cfg, 1, 1).rows(0, 0, 1)
    np.testing.assert_array_equal(held_out_bt, [list(text[SEQ_LEN + 1 :])])


def test_every_epoch_visits_each_window_once_with_its_own_phase(random_corpus):
    batches = data.TrainBatches(random_corpus, SMALL, batch_size=1)
    num_windows = batches.num_windows
    assert num_windows == 61  # 62 fit, and one is left for the phase
    phases, orders = set(), set()
    for epoch in range(6):
        steps = range(epoch * num_windows, (epoch + 1) * num_windows)
        rows_bt = np.concatenate([batches.rows(step, 0, 1) for step in steps])
        starts = first_bytes(random_corpus.train_b, rows_bt)
        phase = int(starts.min())
        np.testing.assert_array_equal(
            np.sort(starts), phase + SEQ_LEN * np.arange(num_windows)
        )
        phases.add(phase)
        orders.add(tuple(starts - phase))
    assert len(phases) > 3
    assert len(orders) == 6


def test_a_batch_depends_on_seed_and_step_alone(random_corpus):
    """Batches of 32 from 61 windows: most of them span two epochs."""
    forward = data.TrainBatches(random_corpus, SMALL, batch_size=32)
    backward = data.TrainBatches(random_corpus, SMALL, batch_size=32)
    steps = [0, 1, 2, 50, 10**9]
    first = {step: forward.rows(step, 0, 32) for step in steps}
    second = {step: backward.rows(step, 0, 32) for step in reversed(steps)}
    for step in steps:
        assert first[step].shape == (32, SEQ_LEN + 1)
        assert first[step].dtype == np.int32
        np.testing.assert_array_equal(first[step], second[step])
    assert len({rows_bt.tobytes() for rows_bt in first.values()}) == len(steps)
    other = data.TrainBatches(
        random_corpus, dataclasses.replace(SMALL, seed=1), batch_size=32
    )
    assert not np.array_equal(other.rows(0, 0, 32), first[0])


def test_windows_of_pysrc_stay_where_they_are(pysrc):
    """A new version of a library that reshuffles would change resumed runs."""
    batches = data.TrainBatches(pysrc, Data(), batch_size=4)
    rows_bt = np.concatenate([batches.rows(step, 0, 4) for step in (0, 30_000)])
    starts = [9_314_673, 20_248_177, 4_313_713, 7_882_097]
    expected_bt = [pysrc.train_b[start : start + 257] for start in starts]
    np.testing.assert_array_equal(rows_bt[:4], expected_bt)
    digest = hashlib.sha256(rows_bt.astype("<i4").tobytes()).hexdigest()
    assert digest == "21a1e8745e7cb970d7076478242241b7d6ee874f293855fe4ce2d737dc771b4d"


@pytest.mark.parametrize("cuts", [(0, 4, 8), (0, 2, 4, 6, 8), (0, 1, 1, 7, 8)])
def test_parts_of_a_batch_make_the_batch(random_corpus, cuts):
    train = data.TrainBatches(random_corpus, SMALL, batch_size=8)
    held_out = data.HeldOut(random_corpus, SMALL, batch_size=8, num_batches=2)
    for batches, step in ((train, 0), (train, 7), (held_out, 0), (held_out, 1)):
        parts = [batches.rows(step, *cut) for cut in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(parts), batches.rows(step, 0, 8))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 5)])
def test_rows_outside_the_batch_are_refused(random_corpus, start, stop):
    with pytest.raises(AssertionError):
        data.TrainBatches(random_corpus, SMALL, 4).rows(0, start, stop)
    with pytest.raises(AssertionError):
        data.HeldOut(random_corpus, SMALL, 4, 2).rows(0, start, stop)


@pytest.mark.parametrize(("batch_size", "num_batches"), [(4, 2), (1, 17), (3, 1)])
def test_held_out_windows_are_disjoint_and_spread(
    random_corpus, batch_size, num_batches
):
    held_out = data.HeldOut(random_corpus, SMALL, batch_size, num_batches)
    rows_bt = np.concatenate(
        [held_out.rows(i, 0, batch_size) for i in range(num_batches)]
    )
    assert rows_bt.dtype == np.int32
    starts = first_bytes(random_corpus.held_out_b, rows_bt)
    gaps = np.diff([*starts, random_corpus.held_out_b.size])
    assert starts[0] == 0
    assert gaps.min() >= SEQ_LEN + 1
    assert gaps.max() - gaps.min() <= 1
    middle = held_out.rows(num_batches - 1, 1, batch_size)
    np.testing.assert_array_equal(middle, rows_bt[-batch_size:][1:])


def test_too_few_held_out_windows_are_counted(random_corpus):
    message = r"eval_batches=3 .* need 18 .* 300 held-out bytes .* have 17 of .*: lower"
    with pytest.raises(ValueError, match=message):
        data.HeldOut(random_corpus, SMALL, batch_size=6, num_batches=3)


def test_identity_names_each_difference(random_corpus):
    saved = data.identity(random_corpus, SMALL, batch_size=8)
    data.check_identity(saved, dict(saved))
    other = dataclasses.replace(SMALL, seed=5, held_out_every=9)
    with pytest.raises(ValueError, match="other data") as error:
        data.check_identity(saved, data.identity(random_corpus, other, batch_size=4))
    message = str(error.value)
    for part in ("seed was 0, is 5", "batch_size was 8, is 4", "held_out_every was 2"):
        assert part in message
    assert "sha256" not in message
    assert "\n" not in message
    with pytest.raises(ValueError, match="seq_len was None, is 16"):
        data.check_identity({k: v for k, v in saved.items() if k != "seq_len"}, saved)


def test_jax_is_not_imported_with_the_module():
    code = "import sys, train.data, train.ngram; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
