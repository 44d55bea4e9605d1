"""Damaged files of every format cause a clear error or a counted skip."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.data_files import (
    TEXTS,
    write_bpe,
    write_jsonl,
    write_npy,
    write_parquet,
    write_text,
)
from train.data.encoding import Recipe
from train.data.indexed import open_tokens, scan
from train.data.prepared import prepare, read_manifest
from train.data.tokenizer import load_tokenizer


def write_shard(path: Path) -> Path:
    prepare([write_jsonl(path.parent / "source.jsonl")], path.parent / "out")
    return path.parent / "out" / path.name


def prepare_one(path: Path) -> None:
    prepare([path], path.parent / "made", Recipe(max_bad_records=3), overwrite=True)


def read_tokens(path: Path) -> None:
    indexed = open_tokens(path, 0)
    assert indexed.start_d[0] == 0
    assert (indexed.start_d[1:] > indexed.start_d[:-1]).all()
    assert indexed.start_d[-1] < indexed.token_b.size
    scan(path)


def encode(path: Path) -> None:
    tokenizer = load_tokenizer(str(path))
    for text in TEXTS:
        tokenizer.decode(tokenizer.encode(text))


FORMATS = {
    "text": ("a.txt", write_text, prepare_one),
    "text.gz": ("a.txt.gz", write_text, prepare_one),
    "jsonl": ("a.jsonl", write_jsonl, prepare_one),
    "jsonl.gz": ("a.jsonl.gz", write_jsonl, prepare_one),
    "parquet": ("a.parquet", write_parquet, prepare_one),
    "npy": ("a.npy", write_npy, read_tokens),
    "idx": ("shard-00000.idx", write_shard, read_tokens),
    "bin": ("shard-00000.bin", write_shard, read_tokens),
    "manifest": ("manifest.json", write_shard, lambda p: read_manifest(p.parent)),
    "tokenizer": ("tokenizer.json", write_bpe, encode),
}


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Flip a bit, insert, delete or overwrite bytes, or truncate, up to three times."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        size = rng.choice([1, 1, 2, 8, 60])
        noise = rng.choice([rng.randbytes(size), b"\0" * size, b"\xff" * size])
        match rng.randrange(5):
            case 0 if at < len(data):
                flipped = data[at] ^ (1 << rng.randrange(8))
                data = data[:at] + bytes([flipped]) + data[at + 1 :]
            case 1:
                data = data[:at]
            case 2:
                data = data[:at] + noise + data[at:]
            case 3:
                data = data[:at] + data[at + size :]
            case _:
                data = data[:at] + noise + data[at + size :]
    return data


def check_mutations(name: str, seeds: range, folder: Path) -> None:
    file_name, write, read = FORMATS[name]
    path = write(folder / file_name)
    whole = path.read_bytes()
    read(path)
    for seed in seeds:
        path.write_bytes(mutate(whole, random.Random(seed)))
        try:
            read(path)
        except ValueError as error:
            message = str(error)
            assert "\n" not in message, (seed, message)
            assert 20 < len(message) < 1000, (seed, message)


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_files(name, tmp_path):
    check_mutations(name, range(25), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_500_mutated_files(name, tmp_path):
    check_mutations(name, range(1000, 1500), tmp_path)


PEAK = """
import sys
from tools import prepare
code = prepare.main(sys.argv[1:])
status = open("/proc/self/status").read()
print(status.split("VmHWM:")[1].split()[0])
sys.exit(code)
"""
"""Prints the peak memory of its own process; ru_maxrss would include the parent."""


def run_prepare(repo: Path, *args: object) -> tuple[int, dict, float]:
    """Run tools/prepare.py; return its exit code, record and peak memory in MiB."""
    process = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, args), "--json"],
        cwd=repo, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.stderr == ""
    *_, record, peak_kib = process.stdout.splitlines()
    return process.returncode, json.loads(record), int(peak_kib) / 1024


@pytest.mark.slow
def test_a_line_of_100_mb_is_skipped_and_never_held(tmp_path, repo):
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        file.write('{"text": "first"}\n{"text": "')
        for _ in range(100):
            file.write("0123456789" * 100_000)
        file.write('"}\n{"text": "last"}\n')
    small = write_jsonl(tmp_path / "small.jsonl")
    _, _, idle_mib = run_prepare(repo, small, "--out", tmp_path / "idle")
    code, record, peak_mib = run_prepare(repo, path, "--out", tmp_path / "out")
    assert (code, record["num_documents"], record["num_bad"]) == (0, 2, 1)
    assert read_manifest(tmp_path / "out")["bad_records"] == [
        f"{path}:2: the line is longer than 16 MiB"
    ]
    assert peak_mib < idle_mib + 48, (
        "three times the longest line that is held in memory"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl.gz", "a.parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, repo, name):
    peaks_mib = []
    for size in (1, 10):
        texts = [f"{i} " * 500 for i in range(1500 * size)]
        path = tmp_path / f"{size} {name}"
        if name == "a.txt":
            write_text(path, "".join(texts))
        elif name == "a.parquet":
            write_parquet(path, texts, rows=len(texts))
        else:
            write_jsonl(path, texts)
        out = tmp_path / f"out {size}"
        peaks_mib.append(run_prepare(repo, path, "--out", out)[2])
    assert peaks_mib[1] < peaks_mib[0] + 24, "the texts differ by 40 MB"
