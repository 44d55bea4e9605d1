"""Make a published model with experts of a dense one (Llama, Mistral, Qwen 2 or 3).

Every expert is a copy of the layer's MLP, so the model computes what the dense one
computes until it is trained. --granularity cuts each copy into smaller experts, and
--noise draws a share of the weights anew. The tokenizer is copied.
"""

import argparse
import time

from moejax.interop.companions import read_companions
from moejax.interop.export import plan_model
from moejax.interop.upcycle import Upcycling, upcycle
from moejax.interop.write import require_new, write_folder
from moejax.model.flops import num_params
from tools.published.export import partial_bytes
from train.logs.counter import BYTES, counted
from train.messages import visible


def work(args: argparse.Namespace) -> dict:
    """Write the folder; return the record."""
    require_new(args.out)
    how = Upcycling(args.experts, args.top_k, args.granularity, args.noise, args.seed)
    begun_sec = time.monotonic()
    model = upcycle(args.folder, how)
    export = plan_model(
        model.network,
        model.params,
        model.router_bias,
        dtype=args.dtype or model.dtype,
        record=model.record,
        files=read_companions(args.folder),
    )
    num_bytes = export.plan.num_bytes
    with counted("writing", BYTES, num_bytes, partial_bytes(args.out)):
        write_folder(args.out, export.plan, export.value, export.files)
    sec = time.monotonic() - begun_sec
    moe, params = model.network.moe, num_params(model.network)
    for note in model.notes:
        print(f"note: {visible(note)}")
    print(
        f"{args.out}: {model.family}, {moe.num_experts} experts of width "
        f"{moe.d_expert}, {moe.top_k} per token, {params['total']:,} parameters "
        f"({params['active']:,} per token), {export.dtype}, {num_bytes:,} bytes of "
        f"tensors, {sec:.1f} s"
    )
    return {
        "out": str(args.out),
        "family": model.family,
        "dtype": export.dtype,
        "num_experts": moe.num_experts,
        "top_k": moe.top_k,
        "params": params["total"],
        "active_params": params["active"],
        "num_bytes": num_bytes,
        "notes": list(model.notes),
        "sec": sec,
    }
