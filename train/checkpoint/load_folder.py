"""Load a published model from its folder, for evaluation and generation, without a run.

source = find_folder(folder, params=["Mesh.expert = 2"])
start(source.cfg)             as in load.py
loaded = load_folder(source)
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence

from moejax.config import Config, Data, Train
from moejax.interop.architecture import CONFIG
from moejax.interop.companions import TOKENIZER, read_text_ids
from moejax.interop.folder import resolve
from moejax.interop.published import Architecture, read_architecture
from train.checkpoint.load import LoadedModel, rebind, resolve_here
from train.checkpoint.record import has_checkpoint
from train.config.names import PARTS
from train.launch.processes import is_first
from train.launch.program import say_loudly

MAX_WINDOW = 2048
"""Data.seq_len of a published model at most, in tokens: the windows of an
evaluation."""


@dataclasses.dataclass(frozen=True)
class FolderSource:
    """A published folder, and the configuration to load it with."""

    folder: pathlib.Path
    cfg: Config
    """Configuration of the model, changed by the bindings that the user gave."""
    is_mesh_given: bool
    """Whether the user gave a mesh."""


def is_folder(path: pathlib.Path) -> bool:
    """Return whether a path is the folder of a published model: it has a config.json
    and no checkpoint."""
    return (path / CONFIG).is_file() and not has_checkpoint(path)


def find_folder(
    folder: pathlib.Path, step: int | None = None, params: Sequence[str] = ()
) -> FolderSource:
    """Read the configuration of a published folder, and no tensor.

    `params` are bindings such as 'Mesh.expert = 2'. Raises a ValueError of one line for
    a config.json that moejax does not know, for a binding that changes the model, and
    for a step.
    """
    if step is not None:
        raise ValueError(
            f"--step={step} names a checkpoint, and {folder} is a published model, "
            "which has one set of weights: leave --step out"
        )
    cfg, is_mesh_given = rebind(_config(folder, read_architecture(folder)), params)
    return FolderSource(folder, cfg, is_mesh_given)


def load_folder(
    source: FolderSource, say: Callable[[str], None] = say_loudly
) -> LoadedModel:
    """Load a published folder onto the devices of this machine, each process what its
    devices hold. The first process says what is unusual. Raises a ValueError of one
    line."""
    from train.checkpoint.from_hf import read_params
    from train.step.compiled import home_placement

    tell = say if is_first() else lambda _: None
    for note in read_architecture(source.folder).notes:
        tell(f"note: {note}")
    run = resolve_here(source.cfg, source.is_mesh_given)
    params, router_bias = read_params(run, say=tell)
    meta = {"config": source.cfg.to_dict(), "data": None}
    placement = home_placement(run)
    return LoadedModel(run, params, router_bias, placement, None, meta, source.folder)


def _config(folder: pathlib.Path, architecture: Architecture) -> Config:
    """Return the configuration of a published model, computed in the dtype of its
    weights, with the folder's tokenizer."""
    fields = {part: dict(values) for part, values in architecture.fields.items()}
    fields["model"] |= {
        "from_hf": str(folder),
        "compute_dtype": architecture.dtype,
        "gradient_reduce_dtype": architecture.dtype,
    }
    length = architecture.record.get("max_position_embeddings") or MAX_WINDOW
    length = min(length, MAX_WINDOW)
    data = Data(
        tokenizer=str(resolve(folder, TOKENIZER)),
        separator=read_text_ids(folder).start,
        seq_len=length,
    )
    train = Train(loss_chunk=math.gcd(length, Train.loss_chunk))
    parts = {part: PARTS[part](**values) for part, values in fields.items()}
    return Config(data=data, train=train, **parts)
