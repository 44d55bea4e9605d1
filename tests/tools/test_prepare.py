"""Test tools/prepare.py: what it reports, refuses and holds in memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.data_files import write_jsonl, write_parquet, write_text
from tools import prepare as tool


def run(capsys, *args):
    code = tool.main([*map(str, args), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]), err


def test_the_program_reports_its_results(tmp_path, capsys):
    write_jsonl(tmp_path / "a.jsonl", ["ab", "", "c"])
    write_text(tmp_path / "b.txt", "def")
    out = tmp_path / "a" / "b"
    code, record, err = run(capsys, f"{tmp_path}/?.*", "--out", out)
    assert (code, err) == (0, "")
    counts = {"num_documents": 3, "num_tokens": 9, "num_empty": 1, "num_shards": 1}
    assert counts | {"exit_code": 0} == {
        key: record[key] for key in (*counts, "exit_code")
    }


def test_the_program_refuses_in_one_line(tmp_path, capsys):
    good = write_jsonl(tmp_path / "a.jsonl")
    rows = write_parquet(tmp_path / "a.parquet")
    bad = write_text(tmp_path / "bad.jsonl", '{"text": "a"}\n{\n')
    empty = write_text(tmp_path / "empty.txt", "")
    out = tmp_path / "out"
    cases = {
        "none.jsonl' is not a file": ["none.jsonl"],
        "bad.jsonl:2' is not a document: not JSON": [bad],
        "hold no text": [empty],
        "is not a Hugging Face tokenizers file": [good, "--tokenizer", good],
        "Data.separator=300": [good, "--separator", "300"],
        "holds int64, not strings": [rows, "--text_key", "id"],
        "exists: name another folder": [good, "--out", tmp_path],
    }
    for message, words in cases.items():
        code, record, err = run(capsys, "--out", out, *words)
        assert (code, record["exit_code"]) == (2, 2)
        assert err == f"error: {record['error']}\n"
        assert message in err
        assert not out.exists()


PEAK = """
import sys
from tools import prepare
code = prepare.main(sys.argv[1:])
status = open("/proc/self/status").read()
print(status.split("VmHWM:")[1].split()[0])
sys.exit(code)
"""
"""Prints the peak memory of its own process; ru_maxrss would include the parent."""


def peak_mib(repo: Path, *args: object) -> float:
    """Run tools/prepare.py and return its peak memory."""
    process = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, args)],
        cwd=repo, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return int(process.stdout.splitlines()[-1]) / 1024


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, repo, name):
    peaks_mib = []
    for num_texts in (16_000, 32_000):
        texts = [f"{i:09} " * 200 for i in range(num_texts)]
        path = tmp_path / f"{num_texts} {name}"
        if name == "a.txt":
            write_text(path, "".join(texts))
        elif name == "a.parquet":
            write_parquet(path, texts, rows=len(texts))
        else:
            write_jsonl(path, texts)
        peaks_mib.append(peak_mib(repo, path, "--out", tmp_path / f"out {num_texts}"))
    assert peaks_mib[1] < peaks_mib[0] + 16, "the texts differ by 32 MB"
