"""tools/simulate.py: what it prints, its record, its picture, and bad input."""

import json

import pytest

from tests.support.run_main import ROOT
from tools import simulate

GIN = [f"--gin_file={ROOT}/configs/tiny_cpu.gin", "--cluster=h100_1x8", "--load=even"]


def test_what_if_prints_a_table_lines_to_paste_and_a_record(capsys, tmp_path):
    picture = tmp_path / "ways.png"
    words = ["what_if", *GIN, "--count=3", "--json", f"--picture={picture}"]
    assert simulate.main(words) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    record = json.loads(last)
    assert lines[0].startswith("h100_1x8: 8 NVIDIA H100")
    assert lines[1].split()[-1] == "how"
    assert [line.split()[0] for line in lines[2:5]] == ["1", "2", "3"]
    first = record["answers"][0]
    assert all(f"    {line}" in lines for line in first["gin_params"])
    assert first["sec"] == pytest.approx(sum(first["parts"].values()))
    hours = 8 * record["tokens"] / first["tok_per_sec"] / 3600
    assert first["device_hours"] == pytest.approx(hours)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--cluster=h100_9x9", "no cluster 'h100_9x9'"),
        ("--load=zapf:1", "'zapf:1' is no synthetic load"),
        ("--load=missing.npz", "missing.npz"),
        ("--tokens=0", "--tokens=0 must be above 0"),
        ("--count=-1", "--count=-1 must be above 0"),
    ],
)
def test_bad_input_is_refused_in_a_line(capsys, flag, words):
    assert simulate.main(["what_if", *GIN, flag]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert words in error[0]
