"""Check a published model: config.json, the headers of its tensors, and all values.

Prints family, parameters, dtype and files, and what moejax reads past. Exit code 2 and
one line say what is wrong.
"""

import argparse
import collections
import math
import time

import numpy as np

from moejax.interop.architecture import CONFIG
from moejax.interop.companions import TOKENIZER
from moejax.interop.export import plan_model
from moejax.interop.published import PublishedModel, open_model
from moejax.interop.strict_json import quoted
from moejax.model.flops import num_params
from train.logs.counter import BYTES, counted
from train.messages import visible

BLOCK_ELEMENTS = 2**22
"""Number of values that are read at a time."""


def work(args: argparse.Namespace) -> dict:
    """Check the folder, print what it is, and return that as a record."""
    if not args.folder.is_dir():
        raise ValueError(
            f"there is no folder {args.folder}: give that of a published model"
        )
    if not (args.folder / CONFIG).is_file():
        raise ValueError(
            f"{args.folder} has no {CONFIG}: give the folder of a published model"
        )
    model = open_model(args.folder)
    record = describe(model)
    show(record)
    if not args.headers_only:
        begun_sec = time.monotonic()
        total, folder = record["num_bytes"], model.folder
        with counted("reading", BYTES, total, lambda: folder.bytes_read):
            require_finite(model)
        sec, num_bytes = time.monotonic() - begun_sec, folder.bytes_read
        rate = num_bytes / 1e6 / sec
        print(f"values      finite; {num_bytes:,} bytes read, {rate:,.0f} MB/s")
    return record


def describe(model: PublishedModel) -> dict:
    """Return what a published model is, as a record."""
    arrays, params = model.folder.arrays.values(), num_params(model.network)
    return {
        "family": model.architecture.family,
        "params": params["total"],
        "active_params": params["active"],
        "dtypes": dict(collections.Counter(str(array.dtype) for array in arrays)),
        "num_tensors": len(arrays),
        "num_bytes": sum(array.nbytes for array in arrays),
        "num_files": model.folder.num_files,
        "tokenizer": TOKENIZER if (model.folder.path / TOKENIZER).is_file() else None,
        "notes": list(model.notes),
    }


def show(record: dict) -> None:
    """Print a record of `describe`."""
    dtypes = ", ".join(f"{name} ({num:,})" for name, num in record["dtypes"].items())
    params, active = record["params"], record["active_params"]
    print(f"family      {record['family']}")
    print(f"parameters  {params:,} ({active:,} per token)")
    print(f"tensors     {record['num_tensors']:,}: {dtypes}")
    print(
        f"files       {record['num_files']}, {record['num_bytes']:,} bytes of tensors"
    )
    print(f"tokenizer   {record['tokenizer'] or 'none: name one by Data.tokenizer'}")
    for note in record["notes"]:
        print(f"note        {visible(note)}")


def require_finite(model: PublishedModel) -> None:
    """Read all weights, decoded as a run would have them; raise ValueError for the
    first tensor with a NaN or an infinity."""
    export = plan_model(
        model.network,
        model.params,
        model.router_bias,
        dtype="float32",
        record=model.architecture.record,
    )
    for name, view in export.tensors.items():
        rows = view.shape[0]
        step = max(1, BLOCK_ELEMENTS // math.prod(view.shape[1:]))
        num_wrong = sum(
            int(np.count_nonzero(~np.isfinite(view.read((slice(i, i + step),)))))
            for i in range(0, rows, step)
        )
        if num_wrong:
            raise ValueError(
                f"{model.folder.path}: tensor {quoted(name)} has {num_wrong:,} values "
                "that are not finite: download the folder again"
            )
