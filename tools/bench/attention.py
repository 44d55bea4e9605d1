"""Time our implementations of attention against JAX's attention with a mask, and state
the memory of each.

    python tools/bench/attention.py [--lengths 512,2048] [--documents 1,8] [--json]
    python tools/bench/attention.py --device gpu --heads 32 --key_heads 4 --width 128

    masked        jax.nn.dot_product_attention as XLA computes it, causal and with a
                  mask [b, 1, t, t] of documents
    masked_cudnn  the same by cuDNN, which takes the mask as a bias (GPU)
    blocked, hopper, cudnn    moejax/kernels/attention; the last two need a GPU

A call is the attention of one layer, forward and backward, without its projections. All
implementations of one length and number of documents take turns, and medians are shown.
Documents have random edges. Before that the results of each implementation are compared
with those of the first one. One that declines, or lacks its device, is left out with
the reason.

Memory is that of the compiled program, by XLA's own analysis: temporaries and results,
without arguments. Nothing is run for it. The exponent is the slope of its logarithm by
that of the length, over the lengths of --memory_lengths.

docs/bench_kernels.md explains the results. Exit codes: 0 done, 1 an implementation
computes something else, 2 bad input, 3 the machine failed.
"""

import argparse
import functools
import os
import pathlib
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from tools.bench import program  # noqa: E402
from tools.bench.turns import median_sec  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import CRASHED, DONE, emit, refuse  # noqa: E402

IMPLS = ("masked", "masked_cudnn", "blocked", "hopper", "cudnn")
BASELINES = ("masked", "masked_cudnn")
"""Forms that get a mask, and no first keys."""
NEED_GPU = ("masked_cudnn", "hopper", "cudnn")
MAX_ERROR = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest ||x - y|| / ||y|| of an array of two implementations. Both round to the
dtype."""
MAX_ERROR_TF32 = 2e-3
"""The same in float32 on a GPU, whose matrix units round both operands to 10 bits."""


class Settings(NamedTuple):
    """Settings that all programs of a run share."""

    device: str
    dtype: str
    batch: int
    heads: int
    key_heads: int
    width: int


class WrongResult(Exception):
    """An implementation computes something else than the first one."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    is_gpu = args.device == "gpu"
    return program.run(work, args, is_gpu=is_gpu, has_huge_pages=argv is None)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    program.add_device(parser, MAX_ERROR)
    add("--impls", default="all", help="implementations with commas between")
    add(
        "--lengths",
        default="512,1024,2048,4096,8192",
        help="tokens of a window in timed cases, with commas between; or 'none'",
    )
    add(
        "--documents",
        default="1,8",
        help="numbers of documents in a window, with commas between",
    )
    add(
        "--memory_lengths",
        default="1024,4096,16384,32768",
        help="tokens of a window in programs whose memory is stated, with commas"
        " between; or 'none'",
    )
    add("--batch", type=int, default=1, help="windows")
    add("--heads", type=int, default=8, help="query heads")
    add("--key_heads", type=int, default=2, help="heads of keys and values")
    add("--width", type=int, default=64, help="width of a head")
    program.add_repeats(parser, 5)
    add("--seed", type=int, default=0, help="random seed of arrays and documents")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    sizes = args.batch, args.heads, args.key_heads, args.width
    settings = Settings(args.device, args.dtype or program.DTYPES[args.device], *sizes)
    if min(*sizes, args.repeats) < 1 or args.heads % args.key_heads:
        raise ValueError(
            f"--batch {args.batch}, --heads {args.heads}, --key_heads {args.key_heads},"
            f" --width {args.width} and --repeats {args.repeats} must be at least 1, "
            "and key heads must divide heads"
        )
    lengths, memory_lengths, documents = (
        parse_numbers(name, getattr(args, name))
        for name in ("lengths", "memory_lengths", "documents")
    )
    for number in documents:
        if lengths and number > min(lengths):
            raise ValueError(f"--documents {number} in --lengths {min(lengths)} tokens")
    impls = program.parse_names("impls", args.impls, IMPLS)
    import jax

    device = program.first_device(args.device)
    here = find_here(impls, settings, [*lengths, *memory_lengths])
    record = {
        "device": device.device_kind,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        **settings._asdict(),
        "repeats": args.repeats,
        "seed": args.seed,
        "declined": {impl: why for impl, why in here.items() if why},
        "times": [],
        "memory": [],
        "exponents": {},
    }
    impls = [impl for impl in impls if not here[impl]]
    print(f"{record['device']}, {settings}, {args.repeats} repeats", flush=True)
    for impl, why in record["declined"].items():
        print(f"{impl} is left out: {why}", flush=True)
    rng = np.random.default_rng(args.seed)
    try:
        for t in lengths:
            for number in documents:
                rows = time_case(impls, settings, (t, number), args.repeats, rng)
                record["times"] += rows
                show_times(rows, is_first=len(record["times"]) == len(rows))
    except WrongResult as error:
        return refuse(error, CRASHED, args.json)
    for impl in impls:
        rows = [memory_row(impl, settings, t) for t in memory_lengths]
        record["memory"] += rows
        if len(rows) > 1:
            record["exponents"][impl] = exponent(rows)
    if memory_lengths:
        show_memory(record)
    emit(record, args.json)
    return DONE


def parse_numbers(name: str, text: str) -> list[int]:
    """Return the numbers in `text`, with commas between; [] for 'none'."""
    if text == "none":
        return []
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--{name} {text} is not numbers with commas") from None
    if min(numbers) < 1:
        raise ValueError(f"--{name} {text} must be numbers of at least 1")
    return numbers


def find_here(
    impls: Iterable[str], settings: Settings, lengths: Iterable[int]
) -> dict[str, str]:
    """Return, for each implementation, the reason why it cannot run here, or ''."""
    import jax

    reasons = {}
    for impl in impls:
        reasons[impl] = ""
        if impl in NEED_GPU and settings.device != "gpu":
            reasons[impl] = f"it needs a GPU, and --device is {settings.device}"
            continue
        for t in lengths:
            try:
                jax.eval_shape(make_call(impl), *shapes(impl, settings, t))
            except (NotImplementedError, RuntimeError) as error:
                reasons[impl] = f"{t} tokens: {error}"
                break
    return reasons


def make_call(impl: str):
    """Return call(q, k, v, dout, documents) -> the output and the gradients of queries,
    keys and values. The documents are a mask, or first keys."""
    import jax

    from moejax.kernels.attention import attention

    def call(q_bthi, k_bugi, v_bugi, dout_bthi, documents):
        if impl in BASELINES:
            attend = functools.partial(
                jax.nn.dot_product_attention,
                mask=documents,
                is_causal=True,
                implementation="cudnn" if impl == "masked_cudnn" else "xla",
            )
        else:
            attend = functools.partial(
                attention, first_bt=documents, implementation=impl
            )
        out_bthi, vjp = jax.vjp(attend, q_bthi, k_bugi, v_bugi)
        return out_bthi, *vjp(dout_bthi)

    return call


def shapes(impl: str, settings: Settings, t: int) -> list:
    """Return the shapes and dtypes of a call's arguments."""
    import jax
    import jax.numpy as jnp

    _, dtype, b, h, g, i = settings
    kept = (
        jax.ShapeDtypeStruct((b, 1, t, t), jnp.bool_)
        if impl in BASELINES
        else jax.ShapeDtypeStruct((b, t), jnp.int32)
    )
    heads = h, g, g, h
    return [*(jax.ShapeDtypeStruct((b, t, n, i), dtype) for n in heads), kept]


@functools.cache
def compiled(impl: str, settings: Settings, t: int):
    """Return the compiled call of an implementation."""
    import jax

    call = jax.jit(make_call(impl))
    return call.lower(*shapes(impl, settings, t)).compile()


def draw_first_keys(rng: np.random.Generator, t: int, number: int) -> np.ndarray:
    """Return the key [t] at which each token's document begins, for a window of
    `number` documents with random edges."""
    edges = np.sort(rng.choice(np.arange(1, t), number - 1, replace=False))
    begin_d = np.concatenate([[0], edges]).astype(np.int32)
    return np.repeat(begin_d, np.diff([*begin_d, t]))


def time_case(
    impls: list[str],
    settings: Settings,
    t_documents: tuple[int, int],
    repeats: int,
    rng: np.random.Generator,
) -> list[dict[str, Any]]:
    """Return a row for each implementation, with its time on the same arrays.

    Raises WrongResult if one differs from the first.
    """
    import jax
    import jax.numpy as jnp

    t, number = t_documents
    first_bt = np.stack(
        [draw_first_keys(rng, t, number) for _ in range(settings.batch)]
    )
    args = [
        jnp.asarray(rng.standard_normal(each.shape), each.dtype)
        for each in shapes("blocked", settings, t)[:4]
    ]
    calls = {}
    for impl in impls:
        documents = jnp.asarray(first_bt)
        if impl in BASELINES:
            documents = (documents[:, :, None] == documents[:, None, :])[:, None]
        call = compiled(impl, settings, t)
        calls[impl] = functools.partial(call, *args, documents)
    expected, errors = jax.device_get(calls[impls[0]]()), {}
    for impl in impls:
        actual = jax.device_get(calls[impl]())
        errors[impl] = float(np.max(list(map(error_of, actual, expected))))  # keeps NaN
    check(errors, settings, t_documents)
    sec = median_sec(calls, repeats)
    return [
        {
            "impl": impl,
            "tokens": t,
            "documents": number,
            "msec": 1e3 * sec[impl],
            "share_of_first": sec[impl] / sec[impls[0]],
            "error": errors[impl],
        }
        for impl in impls
    ]


def error_of(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return ||actual - expected|| / ||expected||."""
    expected = expected.astype(np.float64)
    return float(
        np.linalg.norm(actual.astype(np.float64) - expected) / np.linalg.norm(expected)
    )


def check(errors: dict[str, float], settings: Settings, t_documents) -> None:
    """Raise WrongResult for an error that the dtype does not explain."""
    is_tf32 = (settings.device, settings.dtype) == ("gpu", "float32")
    allowed = MAX_ERROR_TF32 if is_tf32 else MAX_ERROR[settings.dtype]
    for impl, error in errors.items():
        if not error <= allowed:
            t, number = t_documents
            raise WrongResult(
                f"{impl} differs from {next(iter(errors))} by {error:.2g} (allowed: "
                f"{allowed:.2g}) at {t} tokens and {number} documents"
            )


def memory_row(impl: str, settings: Settings, t: int) -> dict[str, Any]:
    """Return the bytes of temporaries and results of an implementation's program."""
    memory = compiled(impl, settings, t).memory_analysis()
    parts = memory.temp_size_in_bytes, memory.output_size_in_bytes
    names = "temporary_bytes", "result_bytes"
    return {"impl": impl, "tokens": t, **dict(zip(names, parts)), "bytes": sum(parts)}


def exponent(rows: list[dict[str, Any]]) -> float:
    """Return p of the fit bytes = c * tokens ** p."""
    tokens, sizes = ([row[name] for row in rows] for name in ("tokens", "bytes"))
    return float(np.polyfit(np.log(tokens), np.log(sizes), 1)[0])


def show_times(rows: list[dict[str, Any]], is_first: bool) -> None:
    """Print the rows of one case, with the head of the table before the first."""
    if is_first:
        print(
            "\n| tokens | documents | implementation | ms "
            f"| / {rows[0]['impl']} | error |"
        )
        print("|--:|--:|---|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row['tokens']} | {row['documents']} | {row['impl']} "
            f"| {row['msec']:.2f} | {row['share_of_first']:.2f} | {row['error']:.1e} |",
            flush=True,
        )


def show_memory(record: dict[str, Any]) -> None:
    """Print the memory of each implementation by length, in MiB."""
    lengths = list(dict.fromkeys(row["tokens"] for row in record["memory"]))
    print(f"\n| MiB of | {' | '.join(map(str, lengths))} tokens | exponent |")
    print("|---|" + "--:|" * (len(lengths) + 1))
    for impl in dict.fromkeys(row["impl"] for row in record["memory"]):
        cells = [
            f"{row['bytes'] / 2**20:.1f}"
            for row in record["memory"]
            if row["impl"] == impl
        ]
        fit = record["exponents"].get(impl)
        cells.append("" if fit is None else f"{fit:.2f}")
        print(f"| {impl} | {' | '.join(cells)} |")
    print("", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
