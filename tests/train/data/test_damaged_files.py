"""Damaged files of every format cause a clear error or a counted skip."""

import gzip
import json
import random
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

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
    assert process.stderr == "" or process.returncode == 2
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


def write_same_rows(path: Path) -> Path:
    """Write a parquet file of 1 kB whose 500 rows have 16 MiB of text each."""
    text = "x" * (16 * 2**20 - 1)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 500), pa.array([text]))
    parquet.write_table(pa.table({"text": column}), path, compression="zstd")
    return path


def write_long_deltas(path: Path) -> Path:
    """Write a parquet file of 1 kB whose texts repeat the one before them."""
    table = pa.table({"text": ["y" * 2**20] * 80})
    options = {"compression": "zstd", "use_dictionary": False}
    encodings = {"text": "DELTA_BYTE_ARRAY"}
    parquet.write_table(table, path, column_encoding=encodings, **options)
    return path


def write_long_pages(path: Path) -> Path:
    """Write a parquet file of 40 kB whose metadata admit to 80 MiB of text."""
    table = pa.table({"text": ["y" * 2**20] * 80})
    parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    return path


def write_empty_texts(path: Path) -> Path:
    """Write a parquet file of 70 million empty texts, a row of 1 bit each."""
    texts = pa.DictionaryArray.from_arrays(np.zeros(7 * 10**7, np.int8), pa.array([""]))
    parquet.write_table(pa.table({"text": texts}), path, compression="zstd")
    return path


def write_gzip(path: Path, kib: bytes) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(70):
            file.write(kib * 2**10)
    return path


BOMBS = {
    "dictionary.parquet": write_same_rows,
    "deltas.parquet": write_long_deltas,
    "pages.parquet": write_long_pages,
    "empty.parquet": write_empty_texts,
    "letters.txt.gz": lambda path: write_gzip(path, b"a" * 2**10),
    "lines.jsonl.gz": lambda path: write_gzip(path, b" " * 1023 + b"\n"),
    "line.jsonl.gz": lambda path: write_gzip(path, b" " * 2**10),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_with_much_text_is_refused(tmp_path, name):
    path = BOMBS[name](tmp_path / name)
    assert path.stat().st_size < 2**19 + 2**17
    with pytest.raises(ValueError) as error:
        prepare([path], tmp_path / "out", Recipe(max_expansion=100))
    assert str(error.value).startswith(f"'{path}' has {path.stat().st_size:,} bytes, ")
    assert "max_expansion=100" in str(error.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_a_text_that_a_parquet_file_stores_once_is_not_held_often(tmp_path, repo):
    small = write_jsonl(tmp_path / "small.jsonl")
    _, _, idle_mib = run_prepare(repo, small, "--out", tmp_path / "idle")
    for name in ("dictionary.parquet", "deltas.parquet"):
        path = BOMBS[name](tmp_path / name)
        code, _, peak_mib = run_prepare(repo, path, "--out", tmp_path / name[:4])
        assert code == 2
        assert peak_mib < idle_mib + 200


def test_an_honest_file_is_read_whatever_its_size(tmp_path):
    path = write_text(tmp_path / "a.txt.gz", "a" * 2**20)
    manifest = prepare([path], tmp_path / "out", Recipe(max_expansion=1))
    assert manifest["num_tokens"] == 2**20 + 1


@pytest.mark.long
def test_a_higher_limit_lets_a_file_pass(tmp_path):
    path = write_gzip(tmp_path / "a.txt.gz", b"a" * 2**10)
    manifest = prepare([path], tmp_path / "out", Recipe(max_expansion=1000))
    assert manifest["num_tokens"] == 70 * 2**20 + 1


@pytest.mark.parametrize("field", ["\\ud800", "\\u001b[2J", "\\u0000"])
def test_names_of_fields_are_escaped_in_reasons(tmp_path, field):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n{{"{field}": 1}}\n')
    (reason,) = prepare([path], tmp_path / "out")["bad_records"]
    assert reason.isprintable()
    reason.encode()


@pytest.mark.parametrize(
    "line", ["[" * 10**6, '{"text":' * 10**5, "[" * 900 + "]" * 900]
)
def test_deeply_nested_records_are_bad_records(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "good"}}\n{line}\n')
    manifest = prepare([path], tmp_path / "out")
    assert (manifest["num_documents"], manifest["num_bad"]) == (1, 1)


WRONG = [None, [], {}, -1, 10**30, 0.5, "7", True, [[]], [None], [{}]]


@pytest.mark.parametrize(
    "field",
    ["format", "tokenizer", "separator", "num_bad", "bad_records", "sources", "shards"],
)
def test_manifests_with_fields_of_a_wrong_type_are_damaged(tmp_path, field):
    path = write_shard(tmp_path / "manifest.json")
    whole = json.loads(path.read_text())
    right = {"bad_records": ([],), "sources": ([],)}.get(field, ())
    for value in WRONG:
        if value in right:
            continue
        path.write_text(json.dumps(whole | {field: value}))
        with pytest.raises(ValueError, match=r"manifest.json' is damaged: "):
            read_manifest(path.parent)
    path.write_text(json.dumps({k: v for k, v in whole.items() if k != field}))
    with pytest.raises(ValueError, match=r"manifest.json' is damaged: "):
        read_manifest(path.parent)


def test_bounds_whose_differences_overflow_are_damaged(tmp_path):
    path = write_shard(tmp_path / "shard-00000.idx")
    whole = path.read_bytes()
    num_s, num_d = struct.unpack_from("<QQ", whole, 18)
    bounds = [0, 2**63 - 1, -(2**63), -1, *[num_s] * (num_d - 4)]
    path.write_bytes(whole[: -8 * num_d] + struct.pack(f"<{num_d}q", *bounds))
    with pytest.raises(ValueError, match="are not in order"):
        open_tokens(path)


@pytest.mark.parametrize("shape", ["(4398046511104,)", f"({'9' * 4000},)", "(-5,)"])
def test_arrays_with_absurd_headers_are_refused(tmp_path, shape):
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}"
    text = header.encode() + b"\n"
    for start in (
        b"\x93NUMPY\x01\0" + struct.pack("<H", len(text)),
        b"\x93NUMPY\x02\0" + struct.pack("<I", len(text)),
        b"\x93NUMPY\x02\0" + struct.pack("<I", 2**32 - 1),
    ):
        (tmp_path / "a.npy").write_bytes(start + text + b"ids ids ")
        with pytest.raises(ValueError, match=r"header") as error:
            open_tokens(tmp_path / "a.npy")
        assert len(str(error.value)) < 400
