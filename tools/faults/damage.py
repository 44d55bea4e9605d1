"""Damage to the files of a run: checkpoints, shards, caches, metrics and summaries."""

import json
import os
import pathlib
import random
import shutil

from tools.faults.fault import GOES_ON, REFUSES_OR_GOES_ON, Damage
from tools.faults.run import START_SEC, Broken, Run, read_lines

GARBAGE = (b"garbage", b"[]", b"null", b"{}", b'{"step": ', b"[" * 100_000, b"\xff\x00")
"""Contents that are not what a program of this project writes."""


def damage_checkpoint(run: Run, rng: random.Random) -> Damage:
    """Damage the newest good checkpoint: it is set aside, the one before is used."""
    how = rng.choice((_flip_arrays, _cut_record, _garble_record, _remove_arrays))
    good = [step for step in run.saved_steps() if step not in run.spoiled]
    if not good:
        raise Broken("there was no good checkpoint to damage")
    folder = run.place.checkpoints / str(good[-1])
    how(folder, rng)
    run.spoiled.add(good[-1])

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
    if len(entries) < 2:
        raise Broken("there were no entries to damage")
    for entry, other in zip(entries, entries[1:] + entries[:1], strict=True):
        how(entry, other, rng)

    def heal() -> None:
        for entry in entries:
            entry.unlink(missing_ok=True)

    def check(text: str) -> None:
        if not any(f"DAMAGED: {entry} " in text for entry in entries):
            raise Broken(f"{how.__name__}: nothing is said of {len(entries)} entries")

    return Damage(REFUSES_OR_GOES_ON, (str(run.place.programs),), heal, check)


def damage_metrics(run: Run, rng: random.Random) -> Damage:
    """Put a bad line into metrics.jsonl: no other line is lost."""
    return _damage_lines(run, rng, "metrics.jsonl")


def damage_samples(run: Run, rng: random.Random) -> Damage:
    """Put a bad line into a file of sample ids: no other line is lost."""
    index = rng.randrange(run.num_processes)
    return _damage_lines(run, rng, f"samples-{index}.jsonl")


def damage_goodput(run: Run, rng: random.Random) -> Damage:
    """Put a bad line into goodput.jsonl: the account of the time goes on without it."""
    path = run.place.run_dir / "goodput.jsonl"
    attempt = max(line["attempt"] for line in read_lines(path))
    _insert_bad_line(path, rng)

    def check(text: str) -> None:
        if read_lines(path)[-1]["attempt"] <= attempt:
            raise Broken(f"the next attempt does not count {attempt} attempts before")

    return Damage(GOES_ON, (), check=check)


def tear_metrics(run: Run, rng: random.Random) -> Damage:
    """Append a torn line to metrics.jsonl, as a machine that lost power would."""
    path = run.place.run_dir / "metrics.jsonl"
    cut = rng.randrange(5, 60)
    torn = path.read_bytes().splitlines()[-1][:cut]
    with path.open("ab") as file:
        file.write(torn)

    def check(text: str) -> None:
        if f"the last line of {path} was torn" not in text:
            raise Broken("nothing is said of the torn line")

    return Damage(GOES_ON, (), check=check)


def damage_summary(run: Run, rng: random.Random) -> Damage:
    """Leave garbage in summary.json."""
    path = run.place.run_dir / "summary.json"
    path.write_bytes(rng.choice(GARBAGE))

    def check(text: str) -> None:
        if f"SUMMARY DAMAGED: {path} " not in text or path.exists():
            raise Broken(f"the bad {path.name} was not set aside")

    def heal() -> None:
        path.unlink(missing_ok=True)

    return Damage(REFUSES_OR_GOES_ON, (path.name,), heal, check)


def damage_hashes(run: Run, rng: random.Random) -> Damage:
    """Damage the records of the hashes of data files: other data are never used."""
    records = list((run.place.hashes / "hashes").glob("*.json"))
    if not records:
        raise Broken("there were no records of hashes to damage")
    what = rng.choice((*GARBAGE, b'{"sha256": 5, "largest": null}', None))
    for path in records:
        good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2] if what is None else what)

    def heal() -> None:
        for path in records:
            path.unlink(missing_ok=True)

    def check(text: str) -> None:
        if not any(
            f"the cached record '{path}' is damaged" in text for path in records
        ):
            raise Broken(f"nothing is said of {len(records)} bad records")

    return Damage(REFUSES_OR_GOES_ON, ("hashes",), heal, check)


def _damage_lines(run: Run, rng: random.Random, name: str) -> Damage:
    """Insert a bad line into a file of the run directory; check that the next start
    names the file, and keeps the line in a file beside."""
    path = run.place.run_dir / name
    bad = _insert_bad_line(path, rng)

    def check(text: str) -> None:
        aside = path.with_name(f"{name}.damaged")
        if f"lines of {path} are moved to {aside.name}" not in text:
            raise Broken(f"nothing is said of the bad line in {name}")
        if bad not in aside.read_bytes().splitlines():
            raise Broken(f"{aside.name} has not the bad line of {name}")

    return Damage(GOES_ON, (), check=check)


def _insert_bad_line(path: pathlib.Path, rng: random.Random) -> bytes:
    """Insert a line of garbage before one of the lines of a file, and return it. A torn
    last line stays torn."""
    bad, share = rng.choice(GARBAGE), rng.random()
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(int(share * len(lines)), bad + b"\n")
    path.write_bytes(b"".join(lines))
    return bad


def _flip_arrays(folder: pathlib.Path, rng: random.Random) -> None:
    """Flip a bit in the middle half of each file of array data."""
    for path in _array_files(folder):
        _flip(path, path, rng)


def _remove_arrays(folder: pathlib.Path, rng: random.Random) -> None:
    for path in _array_files(folder):
        path.unlink()


def _array_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of array data of a checkpoint that are not empty."""
    paths = (folder / "state").rglob("d/*")
    files = [path for path in paths if path.is_file() and _size(path)]
    if not files:
        raise Broken(f"{folder} has no files of array data")
    return files


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
