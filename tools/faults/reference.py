"""The workshop of chaos: text, shards, speeds, and the undisturbed runs."""

import dataclasses
import json
import os
import pathlib
import random
import shutil
import time

from moejax.perf.calibration import Calibration
from tools.faults.promises import Result, expect_nothing_left, read_result
from tools.faults.run import START_SEC, Broken, Place, Run
from train.data.prepared import prepare

NUM_DOCUMENTS, NUM_WORDS = 60, 200
LETTERS = "etaoinshrdlu"
MESH = {"dc": 1, "data": 2, "expert": 4, "tensor": 1}
OLD_SEC = 3600.0
"""Age that the shards are given. Hashes of files of a few seconds are not cached."""


@dataclasses.dataclass(frozen=True)
class Workshop:
    """The folder of all runs of one call of chaos, and what they share."""

    root: pathlib.Path
    programs: pathlib.Path
    """JAX's compilation cache, warm after the undisturbed runs."""

    @property
    def shards(self) -> pathlib.Path:
        return self.root / "shards"

    @property
    def speeds(self) -> pathlib.Path:
        return self.root / "speeds.json"

    def furnish(self) -> None:
        """Write two corpora and a calibration. Raises FileExistsError if the folder has
        been used before."""
        for seed, name in enumerate(("shards", "other")):
            text = self.root / f"{name}.jsonl"
            with text.open("x") as file:
                file.writelines(_documents(random.Random(seed)))
            prepare([text], self.root / name)
        old_sec = time.time() - OLD_SEC
        for path in self.shards.iterdir():
            os.utime(path, (old_sec, old_sec))
        self.speeds.write_text(imaginary_speeds(MESH).to_json())
        self.programs.mkdir(parents=True, exist_ok=True)

    def new_place(self, name: str, *, has_own_programs: bool = False) -> Place:
        """Make the folders of a run. It has shards of its own, and if asked for a copy
        of the compilation cache."""
        root = self.root / name
        programs = root / "programs" if has_own_programs else self.programs
        place = Place(root, root / "shards", self.speeds, programs)
        place.make()
        shutil.copytree(self.shards, place.corpus)
        if has_own_programs:
            shutil.copytree(self.programs, programs)
        return place

    def undisturbed(self, num_processes: int, limit_sec: float) -> Result:
        """Run without faults, and return the result. Raises Broken if that fails, or if
        the balancer has not changed both plan and layout."""
        place = self.new_place(f"undisturbed-{num_processes}")
        run = Run(place, num_processes, limit_sec, pace_sec=0.0)
        try:
            run.start()
            run.expect_end(0, limit_sec + START_SEC)
        finally:
            run.close()
        expect_nothing_left(place)
        result = read_result(place.run_dir)
        decisions = [record.get("decision", {}) for record in result.metrics.values()]
        kinds = {decision.get("kind") for decision in decisions}
        if not {"swap", "relayout"} <= kinds:
            raise Broken(f"the balancer has made no swap or no relayout, only {kinds}")
        return result


def _documents(rng: random.Random):
    """Yield lines of JSON with texts of random words."""
    words = ["".join(rng.choices(LETTERS, k=1 + i % 8)) for i in range(300)]
    for _ in range(NUM_DOCUMENTS):
        yield json.dumps({"text": " ".join(rng.choices(words, k=NUM_WORDS))}) + "\n"


def imaginary_speeds(mesh: dict[str, int]) -> Calibration:
    """Return the speeds of an imaginary machine, at which a relayout pays. `mesh` is
    the number of devices along each axis."""
    line = {"latency_sec": 0.01, "bytes_per_sec": 1e12, "r2": 1.0}
    return Calibration(
        device_kind="cpu",
        mesh=mesh,
        compute_dtype="float32",
        collectives={"all_to_all": {"expert": line}, "all_gather": {"data": line}},
        flops_per_sec=1e6,
        matmul_r2=1.0,
        compile_sec=1.0,
        when="never",
    )
