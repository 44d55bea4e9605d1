"""Time implementations of attention, forward and backward, against JAX's own attention
with a mask, and state the memory of each.

    python tools/bench/attention.py [--lengths 512,2048] [--documents 1,8] [--json]
    python tools/bench/attention.py --device gpu --heads 32 --key_heads 4 --width 128

    masked          jax.nn.dot_product_attention by XLA, causal and with a mask of
                    documents [1, 1, t, t]
    masked_cudnn    the same by cuDNN, which takes the mask as a bias (GPU)
    blocked, cudnn  moejax/kernels/attention; cuDNN's packed documents need a GPU

docs/bench_kernels.md explains the results. Exit codes: 0 done, 1 an implementation
computes something else than the first one, 2 bad input, 3 the machine failed.
"""

import argparse
import functools
import itertools
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

import jax  # noqa: E402
import numpy as np  # noqa: E402

from moejax.kernels import cases  # noqa: E402
from tools.bench import program  # noqa: E402
from tools.bench.timer import median_sec  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import CRASHED, DONE, emit, refuse  # noqa: E402

MASKED = {"masked": "xla", "masked_cudnn": "cudnn"}
"""Implementations of jax.nn.dot_product_attention, by their names here."""
IMPLS = (*MASKED, "blocked", "cudnn")
CALLS_PER_TURN = {"cpu": 1, "gpu": 10}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    is_gpu = args.device == "gpu"
    return program.run(work, args, is_gpu=is_gpu, has_huge_pages=argv is None)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    program.add_device(parser, ("float32", "bfloat16"))
    add("--impls", default="all", help="implementations, with commas between")
    lengths = "512,1024,2048,4096,8192"
    add("--lengths", type=numbers, default=lengths, help="tokens of a window, a list")
    add(
        "--documents", type=numbers, default="1,8", help="documents of a window, a list"
    )
    add("--heads", type=int, default=8, help="query heads")
    add("--key_heads", type=int, default=2, help="heads of keys and values")
    add("--width", type=int, default=64, help="width of a head")
    program.add_repeats(parser, 5)
    return parser.parse_args(argv)


def numbers(text: str) -> list[int]:
    """Return the numbers in `text`, with commas between."""
    return [int(part) for part in text.split(",")]


def work(args: argparse.Namespace) -> int:
    if not 1 <= min(args.documents) <= max(args.documents) <= min(args.lengths):
        raise ValueError("--documents must be from 1 to the smallest of --lengths")
    if args.key_heads < 1 or args.heads % args.key_heads:
        raise ValueError(f"{args.key_heads} key heads must divide {args.heads} heads")
    args.dtype = args.dtype or program.DTYPES[args.device]
    args.impls = program.parse_names("impls", args.impls, IMPLS)
    record = {"device": program.devices(args.device)[0].device_kind, **vars(args)}
    sizes = f"{args.heads} heads of {args.width}, {args.key_heads} of keys"
    print(f"{record['device']}, {args.dtype}, {sizes}, {args.repeats} repeats\n")
    print("| tokens | documents | implementation | ms | / first | MiB | error |")
    print("|--:|--:|---|--:|--:|--:|--:|")
    record["times"] = rows = []
    for t, num_documents in itertools.product(args.lengths, args.documents):
        for row in time_case(args, t, num_documents):
            rows.append({"tokens": t, "documents": num_documents, **row})
            print("|", ROW[row["declined"] is None].format(**rows[-1]), "|", flush=True)
    if wrong := {row["impl"] for row in rows if row.get("is_right") is False}:
        return refuse(f"{sorted(wrong)} compute something else", CRASHED, args.json)
    emit(record, args.json)
    return DONE


ROW = (
    "{tokens} | {documents} | {impl} | declined: {declined} | | |",
    "{tokens} | {documents} | {impl} "
    "| {msec:.2f} | {share_of_first:.2f} | {mib:.1f} | {error:.1e}",
)
"""Row of the table of an implementation that declines, and of one that does not."""


def time_case(
    args: argparse.Namespace, t: int, num_documents: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each implementation, on one window of documents with random
    edges. Those that decline come first."""
    edges = np.random.default_rng(0).choice(t - 1, num_documents - 1, replace=False) + 1
    documents = tuple(np.diff([0, *np.sort(edges), t]).tolist())
    heads = args.heads, args.key_heads
    case = cases.attention_case(args.dtype, documents, heads, args.width)
    *arrays, first_bt = (array[:1] for array in case.draw())
    mask = (first_bt[:, :, None] == first_bt[:, None, :])[:, None]
    memory, calls, results = {}, {}, {}
    for impl in args.impls:
        is_masked = impl in MASKED
        call = masked(MASKED[impl]) if is_masked else case.call(impl, False)
        arguments = jax.device_put((*arrays, mask if is_masked else first_bt))
        try:
            compiled = jax.jit(call).lower(*arguments).compile()
            results[impl] = jax.device_get(compiled(*arguments)[:4])
        except (NotImplementedError, RuntimeError) as error:
            yield {"impl": impl, "declined": str(error)}
        else:
            memory[impl] = compiled.memory_analysis()
            calls[impl] = functools.partial(compiled, *arguments)
    sec = median_sec(calls, args.repeats, CALLS_PER_TURN[args.device])
    is_tf32 = (args.device, args.dtype) == ("gpu", "float32")
    tolerance = cases.TF32_TOLERANCE if is_tf32 else case.tolerance
    first = next(iter(calls), None)
    for impl in calls:
        num_bytes = memory[impl].temp_size_in_bytes + memory[impl].output_size_in_bytes
        error = case.error(results[impl], results[first])
        yield {
            "impl": impl,
            "declined": None,
            "msec": 1e3 * sec[impl],
            "share_of_first": sec[impl] / sec[first],
            "mib": num_bytes / 2**20,
            "error": error,
            "is_right": error <= tolerance,
        }


def masked(implementation: str):
    """Return both passes of JAX's own attention with a mask."""

    def call(q_bthi, k_bugi, v_bugi, dout_bthi, _, mask):
        options = {"is_causal": True, "implementation": implementation}
        attend = functools.partial(jax.nn.dot_product_attention, mask=mask, **options)
        out_bthi, back = jax.vjp(attend, q_bthi, k_bugi, v_bugi)
        return out_bthi, *back(dout_bthi)

    return call


if __name__ == "__main__":
    sys.exit(main())
