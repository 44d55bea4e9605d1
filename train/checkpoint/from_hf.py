"""Start a run from the folder of a published model, and keep what belongs to the model.

<run directory>/hf     config.json, generation_config.json and the tokenizer's files
                       of the folder, from which tools/hf.py exports
"""

import contextlib
import hashlib
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

from moejax.config import Config
from moejax.interop.architecture import CONFIG
from moejax.interop.arrays import to_arrays
from moejax.interop.companions import (
    COMPANIONS,
    TOKENIZER,
    read_companions,
    read_text_ids,
)
from moejax.interop.folder import resolve
from moejax.interop.published import PublishedModel, open_model
from moejax.plan.layout import Store
from moejax.resolve.resolved import Resolved
from train.checkpoint.checksum import named_leaves
from train.config.from_hf import KEPT, folder_of, missing_tokenizer
from train.data.tokenizer import Tokenizer
from train.files import write_whole
from train.launch.processes import are_several
from train.step.state import TrainState, abstract_state, state_from

Watch = Callable[
    [str, int, Callable[[], int]], contextlib.AbstractContextManager[object]
]
"""A function (what, total bytes, bytes done) -> context of a long piece of work."""


def unwatched(what: str, total: int, poll: Callable[[], int]):
    """Return a context that shows nothing."""
    return contextlib.nullcontext()


def check_folder(cfg: Config) -> str:
    """Check the headers of the folder of Model.from_hf against its config.json, and
    that its tokenizer is there if Data.tokenizer names it; return `headers_sha256`.

    Raises a ValueError of one line.
    """
    folder = folder_of(cfg.model.from_hf)
    if not (folder / CONFIG).exists():
        raise ValueError(
            f"Model.from_hf='{cfg.model.from_hf}' has no {CONFIG}, and a new run reads "
            "its first parameters there: give the folder of a published model"
        )
    sha256 = headers_sha256(folder)
    if problem := missing_tokenizer(cfg):
        raise ValueError(problem)
    return sha256


def notes_on_tokens(cfg: Config, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return a line where the tokenizer of a run, or the tokens around its texts, are
    not those of the folder of Model.from_hf; none where there is no such folder."""
    name = cfg.model.from_hf
    if name is None or not (folder_of(name) / CONFIG).exists():
        return ()
    folder = folder_of(name)
    own = folder / TOKENIZER
    if not own.exists() or (
        tokenizer.sha256 != hashlib.sha256(own.read_bytes()).hexdigest()
    ):
        return (
            f"note: Data.tokenizer='{tokenizer.name}' is not that of {folder}, with "
            "whose ids the weights were trained",
        )
    ids, around = read_text_ids(folder), (tokenizer.separator, tokenizer.text_end)
    if not ids.others(*around):
        return ()
    return (
        f"note: texts begin with token {around[0]} (Data.separator) and end with "
        f"{around[1]} (Data.end, else the separator), and those of {folder} with "
        f"{ids.start} and {list(ids.ends)}: the model has to learn it, and an export "
        "will say so",
    )


def headers_sha256(folder: pathlib.Path) -> str:
    """Return the sha256 of names, dtypes and shapes of a folder's tensors, which are
    checked against its config.json. No tensor is read. Raises a ValueError of one
    line."""
    arrays = open_model(folder).folder.arrays
    lines = [f"{n} {array.dtype} {array.shape}" for n, array in sorted(arrays.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def require_origin(cfg: Config, run_dir: pathlib.Path) -> None:
    """Raise ValueError for a run directory without a checkpoint that keeps the files of
    a published model, if the configuration names no folder to start from: the
    parameters would be random."""
    if cfg.model.from_hf is None and (run_dir / KEPT / CONFIG).exists():
        raise ValueError(
            f"the run in {run_dir} came from a published model, and would start from "
            "random parameters without a checkpoint: import the model again "
            "(tools/hf.py import), bind Model.from_hf to its folder, or name another "
            "--run_dir"
        )


def read_params(
    run: Resolved,
    store: Store = "owned",
    say: Callable[[str], None] = print,
    watch: Watch = unwatched,
) -> tuple[Any, Any]:
    """Return the parameters and the router bias of the folder of Model.from_hf on the
    devices of a run, as `abstract_state` shards them.

    Each process reads what its devices hold; the line that it says counts these bytes.
    Lines about tensors that are read past come before it.
    """
    folder = folder_of(run.cfg.model.from_hf)
    abstract = abstract_state(run, optax.identity(), store)
    wanted = {"params": abstract.params, "router_bias": abstract.router_bias}
    begun_sec = time.monotonic()
    published = open_model(folder)
    for note in published.notes[len(published.architecture.notes) :]:
        say(f"note: {note}")
    total = sum(array.nbytes for array in published.folder.arrays.values())
    with watch("reading", total, lambda: published.folder.bytes_read):
        arrays = _to_tree(published, wanted)
    num_bytes = published.folder.bytes_read
    sec = time.monotonic() - begun_sec
    whose = " for the devices of this process" if are_several() else ""
    say(
        f"read {num_bytes:,} bytes of {folder}{whose} in {sec:.1f} s, "
        f"{num_bytes / 1e6 / sec:,.0f} MB/s"
    )
    return arrays["params"], arrays["router_bias"]


def first_state(
    run: Resolved,
    optimizer,
    store: Store,
    say: Callable[[str], None] = print,
    watch: Watch = unwatched,
) -> TrainState:
    """Return the state at step 0 of a run that starts from the folder of Model.from_hf,
    as `read_params` reads it."""
    params, router_bias = read_params(run, store, say, watch)
    return state_from(params, router_bias, run, optimizer, store)


def keep_companions(cfg: Config, run_dir: pathlib.Path) -> None:
    """Copy config.json, generation_config.json and the tokenizer of the folder of
    Model.from_hf to the run directory, in place of those of an earlier start. Raises
    ValueError for a link that leaves the folder."""
    folder, kept = folder_of(cfg.model.from_hf), run_dir / KEPT
    config = resolve(folder, CONFIG).read_bytes()
    files = {CONFIG: config, **read_companions(folder)}
    kept.mkdir(parents=True, exist_ok=True)
    for name in {CONFIG, *COMPANIONS} - files.keys():
        (kept / name).unlink(missing_ok=True)
    for name, content in files.items():
        write_whole(kept / name, content)


def _to_tree(published: PublishedModel, wanted: Any) -> Any:
    """Return the tensors of a folder as a tree of arrays like `wanted`, which holds
    their shapes and shardings."""
    views = {"params": published.params, "router_bias": published.router_bias}
    views, shapes = named_leaves(views), named_leaves(wanted)
    for name, leaf in shapes.items():
        assert views[name].shape == leaf.shape, (name, views[name].shape, leaf.shape)
    assert views.keys() == shapes.keys(), views.keys() ^ shapes.keys()
    arrays = to_arrays(views, {name: leaf.sharding for name, leaf in shapes.items()})
    leaves = [arrays[name] for name in shapes]
    return jax.tree.unflatten(jax.tree.structure(wanted), leaves)
