"""Damage to the files of a run: checkpoints, shards, caches, metrics and summaries."""

import json
import os
import pathlib
import random
import shutil

from tools.faults.fault import GOES_ON, REFUSES_OR_GOES_ON, Damage
from tools.faults.run import START_SEC, Broken, Run

GARBAGE = (b"garbage", b"[]", b"null", b"{}", b'{"step": ', b"[" * 100_000, b"\xff\x00")
"""Contents that are not what a program of this project writes."""


def damage_checkpoint(run: Run, rng: random.Random) -> Damage:
    """Damage the newest checkpoint: it is set aside, and never used."""
    steps = run.saved_steps()
    how = rng.choice((_flip_arrays, _cut_record, _garble_record, _remove_arrays))
    if not steps:
        return Damage(GOES_ON, ())
    folder = run.place.checkpoints / str(steps[-1])
    how(folder, rng)

    def check(text: str) -> None:
        aside = list(folder.parent.glob(f"{folder.name}.corrupt*"))
        if not aside or f"CORRUPT CHECKPOINT {folder.name} renamed" not in text:
            raise Broken(f"{how.__name__}: {folder.name} was not set aside")

    return Damage(GOES_ON, (), check=check)


def damage_shards(run: Run, rng: random.Random) -> None:
    """Flip a bit in each KiB of a shard and keep its mtime: the run ends with 2 and
    names file and block. Then heal the shard."""
    (path,) = run.place.corpus.glob("*.bin")
    good, stat = path.read_bytes(), path.stat()
    rotten = bytearray(good)
    for start in range(0, len(rotten), 1024):
        at = start + rng.randrange(min(1024, len(rotten) - start))
        rotten[at] ^= 1 << rng.randrange(8)
    times = (stat.st_atime_ns, stat.st_mtime_ns)
    _overwrite(path, bytes(rotten), times)
    try:
        run.start()
        run.expect_end(2, START_SEC)
    finally:
        _overwrite(path, good, times)
    line = run.error()
    if path.name not in line or "block" not in line:
        raise Broken(f"the line names not both file and block: {line[:300]}")


def damage_programs(run: Run, rng: random.Random) -> Damage:
    """Damage every second entry of the compilation cache: no other program is run."""
    there = sorted(run.place.programs.rglob("*-cache"))
    entries = rng.sample(there, len(there) // 2)
    how = rng.choice((_swap, _cut, _flip))
    for entry, other in zip(entries, entries[1:] + entries[:1], strict=True):
        how(entry, other, rng)

    def heal() -> None:
        for entry in entries:
            entry.unlink(missing_ok=True)

    return Damage(REFUSES_OR_GOES_ON, (str(run.place.programs),), heal)


def damage_metrics(run: Run, rng: random.Random) -> Damage:
    """Put a bad line into metrics.jsonl: no other line is lost."""
    return _damage_lines(run, rng, "metrics.jsonl")


def damage_samples(run: Run, rng: random.Random) -> Damage:
    """Put a bad line into a file of sample ids: no other line is lost."""
    index = rng.randrange(run.num_processes)
    return _damage_lines(run, rng, f"samples-{index}.jsonl")


def damage_goodput(run: Run, rng: random.Random) -> Damage:
    """Put a bad line into goodput.jsonl: the account of the time goes on without it."""
    return _damage_lines(run, rng, "goodput.jsonl", is_named=False)


def tear_metrics(run: Run, rng: random.Random) -> Damage:
    """Append a torn line to metrics.jsonl, as a machine that lost power would."""
    path = run.place.run_dir / "metrics.jsonl"
    cut = rng.randrange(5, 60)
    lines = path.read_bytes().splitlines() if path.is_file() else []
    if lines:
        with path.open("ab") as file:
            file.write(lines[-1][:cut])
    return Damage(GOES_ON, ())


def damage_summary(run: Run, rng: random.Random) -> Damage:
    """Leave garbage in summary.json."""
    path = run.place.run_dir / "summary.json"
    path.write_bytes(rng.choice(GARBAGE))

    def check(text: str) -> None:
        if path.name not in text:
            raise Broken(f"nothing is said of the bad {path.name}")

    return Damage(REFUSES_OR_GOES_ON, (path.name,), path.unlink, check)


def damage_hashes(run: Run, rng: random.Random) -> Damage:
    """Damage the records of the hashes of data files: other data are never used."""
    records = list((run.place.hashes / "hashes").glob("*.json"))
    what = rng.choice((*GARBAGE, b'{"sha256": 5, "largest": null}', None))
    for path in records:
        good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2] if what is None else what)

    def heal() -> None:
        for path in records:
            path.unlink(missing_ok=True)

    return Damage(REFUSES_OR_GOES_ON, ("hashes",), heal)


def _damage_lines(
    run: Run, rng: random.Random, name: str, *, is_named: bool = True
) -> Damage:
    """Insert a line of garbage before a line of a file; if `is_named`, check that the
    next start names the file."""
    path, bad = run.place.run_dir / name, rng.choice(GARBAGE)
    share = rng.random()
    lines = path.read_bytes().splitlines() if path.is_file() else []
    if len(lines) < 2:
        return Damage(GOES_ON, ())
    lines.insert(int(share * (len(lines) - 1)), bad)
    path.write_bytes(b"\n".join(lines) + b"\n")

    def check(text: str) -> None:
        if is_named and name not in text:
            raise Broken(f"nothing is said of the bad line in {name}")

    return Damage(GOES_ON, (), check=check)


def _flip_arrays(folder: pathlib.Path, rng: random.Random) -> None:
    """Flip a bit in the middle half of each file of array data."""
    for path in (folder / "state").rglob("d/*"):
        if path.is_file() and _size(path):
            _flip(path, path, rng)


def _remove_arrays(folder: pathlib.Path, rng: random.Random) -> None:
    for path in (folder / "state").rglob("d/*"):
        if path.is_file():
            path.unlink()


def _cut_record(folder: pathlib.Path, rng: random.Random) -> None:
    path = folder / "record" / "metadata"
    _cut(path, path, rng)


def _garble_record(folder: pathlib.Path, rng: random.Random) -> None:
    """Change one number of the record to another, so that it is still JSON."""
    path = folder / "record" / "metadata"
    record = json.loads(path.read_text())
    record["meta"]["num_owners"] = 1 + record["meta"]["num_owners"]
    path.write_text(json.dumps(record))


def _swap(path: pathlib.Path, other: pathlib.Path, rng: random.Random) -> None:
    """Replace a file by a copy of another one."""
    shutil.copyfile(other, path)


def _cut(path: pathlib.Path, other: pathlib.Path, rng: random.Random) -> None:
    os.truncate(path, int(_size(path) * rng.random()))


def _flip(path: pathlib.Path, other: pathlib.Path, rng: random.Random) -> None:
    """Flip one bit in the middle half of a file."""
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data) // 4, max(1, 3 * len(data) // 4))
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size


def _overwrite(path: pathlib.Path, data: bytes, times: tuple[int, int]) -> None:
    """Write a file in place, with these times of access and of change in ns."""
    path.write_bytes(data)
    os.utime(path, ns=times)
