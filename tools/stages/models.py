"""The models that a bring-up tunes and trains: given configurations, cut to the devices
that are here."""

import dataclasses
import json
import pathlib
import random

from moejax.config import Config
from tools.stages.stage import Settings
from train.files import write_whole

TOY = pathlib.Path(__file__).with_name("toy.gin")
"""Model of a dry run, and of the stage 'resume'."""
SEQUENCES = 2
"""Sequences of a device in a micro-batch."""
MICRO_BATCHES = 2
USED_SHARE = 0.92
"""Share of what a run may use that the predicted memory may take. A prediction is
within 10 % of the compiled peak, mostly within 6 %."""
NUM_WORDS = {True: 20_000, False: 2_000_000}
"""Words of the corpus that is written where none is given, by Settings.is_dry."""
WORDS = 300


def read_models(settings: Settings) -> dict[str, Config]:
    """Return the configurations by name, each on the devices that are here: experts are
    divided over all of them, and a device has two sequences in a micro-batch."""
    from train.config import gin_reader

    files = [TOY] if settings.is_dry else settings.gin_files
    return {
        pathlib.Path(file).stem: gin_reader.load([file], params(settings, file))
        for file in files
    }


def params(settings: Settings, gin_file) -> list[str]:
    """Return the bindings that put a configuration on the devices that are here."""
    own = [f"Data.corpus = '{corpus(settings)}'", "Optimizer.decay = 'constant'"]
    if settings.is_dry:
        return [*own, f"Train.num_simulated_devices = {settings.num_devices}"]
    from train.config import gin_reader

    cfg, num = gin_reader.load([gin_file], own), settings.num_devices
    if num % 2 or cfg.moe.num_experts % num:
        sizes = {"data": num, "expert": 1}
    else:
        sizes = {"data": 1, "expert": num}
    own += [f"Mesh.{axis} = {sizes.get(axis, 1)}" for axis in
            ("dc", "data", "expert", "tensor")]  # fmt: skip
    return [
        *own,
        f"Moe.halves = {cfg.moe.halves and num > 1}",
        f"Train.batch_size = {SEQUENCES * MICRO_BATCHES * num}",
        f"Train.accumulate_steps = {MICRO_BATCHES}",
        "Optimizer.warmup_steps = 10",
    ]


def trained_model(settings: Settings) -> Config:
    """Return the first configuration, with as many layers as are predicted to fit on
    these devices. jax must have its flags. Raises ValueError if one layer does not
    fit."""
    name, cfg = next(iter(read_models(settings).items()))
    if settings.is_dry:
        return cfg
    path = pathlib.Path(settings.work) / "layers.json"
    key = f"{name} on {settings.num_devices} x {settings.device_kind}"
    known = json.loads(path.read_text()) if path.is_file() else {}
    if key not in known:
        known[key] = find_layers(cfg, settings)
        write_whole(path, json.dumps(known))
    return with_layers(cfg, known[key])


def find_layers(cfg: Config, settings: Settings) -> int:
    """Return the largest number of layers that is predicted to fit."""
    low, high = 0, cfg.model.num_layers
    room = USED_SHARE * room_bytes(settings)
    while low < high:
        middle = (low + high + 1) // 2
        if predicted_bytes(with_layers(cfg, middle), settings) <= room:
            low = middle
        else:
            high = middle - 1
    if not low:
        raise ValueError(
            f"one layer of {settings.gin_files[0]} does not fit into "
            f"{room / 2**30:.1f} GiB: give a smaller --gin_file"
        )
    return low


def with_layers(cfg: Config, num_layers: int) -> Config:
    model = dataclasses.replace(cfg.model, num_layers=num_layers)
    return dataclasses.replace(cfg, model=model)


def room_bytes(settings: Settings) -> int:
    """Return the bytes of a device that a run may use."""
    from moejax.perf import target
    from train.launch.program import usable_bytes

    gpu = target.of_device(settings.device_kind)
    if gpu is not None:
        return usable_bytes(gpu.memory_bytes)
    return settings.memory_bytes or 2**40


def predicted_bytes(cfg: Config, settings: Settings) -> int:
    """Return the bytes of a device that the dry run predicts for a step's peak."""
    from moejax.perf import target
    from train.dry_run import dry_run

    gpu = None if settings.is_dry else target.of_device(settings.device_kind)
    return sum(dry_run(cfg, gpu)["memory"].values())


def corpus(settings: Settings) -> pathlib.Path:
    """Return the corpus to train on: the one that was given, or a text of random words,
    which is written once."""
    if settings.corpus:
        return pathlib.Path(settings.corpus)
    path = pathlib.Path(settings.work) / "words.txt"
    if not path.is_file():
        write_whole(path, random_words(NUM_WORDS[settings.is_dry]))
    return path


def random_words(num_words: int) -> str:
    """Return a text of random words, in documents of a hundred."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=1 + i % 8)) for i in range(WORDS)]
    chosen = rng.choices(words, k=num_words)
    parts = (" ".join(chosen[i : i + 100]) for i in range(0, num_words, 100))
    return "\n\n".join(parts) + "\n"
