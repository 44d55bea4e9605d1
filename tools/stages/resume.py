"""The stage 'resume': a run that goes on from a checkpoint ends with the same bits; and
with several devices every way to exchange rows gives what the padded one gives."""

import json
import os
import shutil
import sys

from tools.stages import runner
from tools.stages.models import TOY, corpus
from tools.stages.stage import Result, Task

NUM_STEPS, SAVED_STEP = 6, 3
GPU_PARAMS = (
    "Model.d_model = 1024",
    "Model.num_layers = 2",
    "Model.head_dim = 64",
    "Model.num_heads = 16",
    "Model.num_kv_heads = 16",
    "Model.compute_dtype = 'bfloat16'",
    "Moe.d_expert = 512",
    "Data.seq_len = 512",
    "Train.loss_chunk = 512",
)
"""Sizes for which our kernels run."""
DRY_DEVICES = 4
"""Number of simulated devices that exchange rows in a dry run."""


def work(task: Task) -> Result:
    """Compare the exchanges, with several devices; then save, restore and compare."""
    found, why_not = {}, ""
    if task.settings.is_dry or task.settings.num_devices > 1:
        task.note("the exchanges")
        found, why_not = compare_exchanges(task)
    task.note("a run of six steps", exchanges=found)
    digests = run_twice(task)
    task.note("the end", digests=digests)
    wrong = [f"{name}: {row['why']}" for name, row in found.items() if row["why"]]
    wrong += [why_not] if why_not else []
    first, again = digests
    if first != again:
        text = f"a run that went on from step {SAVED_STEP} ends with other bits"
        wrong.append(f"{text}: {again} instead of {first}")
    if wrong:
        return Result("failed", "; ".join(wrong), task.figures)
    text = "exchanges need several devices"
    if found:
        text = f"{', '.join(found)} equal the padded exchange"
    why = f"the same digest {first} after a restore; {text}"
    return Result("passed", why, task.figures)


def run_twice(task: Task) -> list[str]:
    """Train from the start, then again from the checkpoint of SAVED_STEP, and return
    the digests of the parameters. Raises RuntimeError if a run fails."""
    from train import main

    settings, folder = task.settings, task.path.with_name("run")
    shutil.rmtree(folder, ignore_errors=True)
    params = [f"Data.corpus = '{corpus(settings)}'", f"Train.num_steps = {NUM_STEPS}"]
    params += [f"Checkpoint.every_steps = {SAVED_STEP}", "Checkpoint.keep_last = 3"]
    if settings.is_dry:
        params.append("Train.num_simulated_devices = 1")
    else:
        params += [*GPU_PARAMS, f"Mesh.data = {settings.num_devices}"]
        params.append(f"Train.batch_size = {8 * settings.num_devices}")
    words = [f"--gin_file={TOY}", f"--run_dir={folder}"]
    words += [f"--gin_param={param}" for param in params]
    digests = []
    for flags in ([], [f"--from_step={SAVED_STEP}"]):
        if code := main.main([*words, *flags]):
            raise RuntimeError(f"train/main.py ended with exit code {code} (log.txt)")
        digests.append(json.loads((folder / "summary.json").read_text())["digest"])
    return digests


def compare_exchanges(task: Task) -> tuple[dict, str]:
    """Return the error of each exchange against the padded one, and why some have none,
    or ''."""
    environ, path = dict(os.environ), task.path.with_name("exchanges.json")
    if task.settings.is_dry:
        flag = f"--xla_force_host_platform_device_count={DRY_DEVICES}"
        environ["XLA_FLAGS"] = f"{environ.get('XLA_FLAGS', '')} {flag}".strip()
    path.unlink(missing_ok=True)
    words = [sys.executable, "-m", "tools.stages.exchanges"]
    words += [str(task.path.with_name("settings.json")), str(path)]
    end = runner.run_in_group(words, max(1.0, task.left_sec - 1), environ)
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found, f"the exchanges: {end.why}" if end.why else ""
