"""Test that processes which differ refuse to train together, and end together."""

import re

import pytest

from tests.support.workers import WORKERS, run_apart
from train.config import gin_reader
from train.job import prepare
from train.launch.agreement import device_facts, first_difference, program_facts

BAD_INPUT = 2


def test_the_first_differing_line_of_each_process_is_named():
    facts = {"data": "same\nseed = 1", "code": "a 1\nb 2"}
    other = facts | {"code": "a 1\nb 3"}
    assert (
        first_difference(facts, other, 3)
        == "code: process 0 has 'b 2', process 3 has 'b 3'"
    )
    other = {"data": "same\nseed = 1"}
    assert first_difference(facts, other, 1).endswith("'a 1', process 1 has 'nothing'")
    other = facts | {"data": "seed = 1\nsame"}
    assert first_difference(facts, other, 1).startswith("data: process 0 has 'same', ")


def test_a_line_that_one_process_has_twice_differs():
    """XLA's flags may be given twice."""
    twice = {"flags": "--a\n--a"}
    expected = "flags: process 0 has '--a', process 1 has 'nothing'"
    assert first_difference(twice, {"flags": "--a"}, 1) == expected
    expected = "flags: process 0 has 'nothing', process 1 has '--a'"
    assert first_difference({"flags": "--a"}, twice, 1) == expected


def test_the_difference_of_long_lines_is_shown():
    lines = [{"data": "x" * 1000 + end + "y" * 1000} for end in ("1", "2")]
    text = first_difference(*lines, 1)
    assert "x1y" in text
    assert "x2y" in text
    assert len(text) < 500


def test_program_facts_name_every_source_file_library_and_flag(monkeypatch):
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=true"
    monkeypatch.setenv("XLA_FLAGS", flags)
    facts = program_facts()
    assert "train/launch/agreement.py " in facts["code"]
    assert "\njax 0." in facts["libraries"]
    assert "jax_enable_x64 = False" in facts["settings of jax"]
    assert facts["settings of jax"].endswith("\nXLA --xla_cpu_enable_fast_math=true")
    assert "force_host_platform_device_count" not in facts["settings of jax"]


def test_device_facts_have_the_hash_of_the_choices_of_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEJAX_TUNED", str(tmp_path))
    assert device_facts()["choices of kernels"] == "cpu.json is not here"
    (tmp_path / "cpu.json").write_text('{"tiles": {}}')
    before = device_facts()["choices of kernels"]
    assert re.fullmatch(r"cpu\.json [0-9a-f]{16}", before)
    (tmp_path / "cpu.json").write_text('{"tiles": {}, "measured": {}}')
    assert device_facts()["choices of kernels"] != before


def test_job_facts_have_the_hash_of_the_text(tmp_path, monkeypatch):
    """One byte of a corpus differs, under the same name."""
    text, facts = "the words of a corpus, again and again. " * 300, []
    monkeypatch.chdir(tmp_path)
    for each in (text, text, text.replace("a", "e", 1)):
        (tmp_path / "corpus.txt").write_text(each)
        cfg = gin_reader.load([WORKERS], ["Data.corpus = 'corpus.txt'"])
        facts.append(prepare(cfg).facts)
    assert facts[0] == facts[1]
    assert first_difference(facts[0], facts[2], 1).startswith(
        "data: process 0 has \"sha256 = '"
    )


@pytest.mark.slow
def test_another_configuration_on_one_process_ends_all(tmp_path):
    param = "Optimizer.learning_rate = 0.5"
    ended = run_apart(tmp_path / "run", [(), (param,)])
    assert [x.code for x in ended] == [BAD_INPUT, BAD_INPUT]
    for x in ended:
        assert x.err.count("\n") == 1
        assert f"process 1 has {param!r}" in x.err
        assert x.record["error"] == x.err.removeprefix("error: ").strip()
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_bad_input_of_one_process_ends_the_others_with_its_line(tmp_path):
    """No launcher is there to end them, and no heartbeat is waited for."""
    (tmp_path / "b").mkdir()
    (tmp_path / "corpus.txt").write_text("the words of a corpus. " * 500)
    params = ("Data.corpus = 'corpus.txt'",)
    folders = [tmp_path, tmp_path / "b"]
    ended = run_apart(tmp_path / "run", [params, params], folders=folders)
    assert [x.code for x in ended] == [BAD_INPUT, BAD_INPUT]
    assert "'corpus.txt'" in ended[1].err
    assert ended[0].err.startswith("error: process 1 has ended the run: ")
    assert "'corpus.txt'" in ended[0].err
