"""Time our forms of attention against JAX's attention with a mask, and state the memory
of each.

    python tools/bench/attention.py [--lengths 512,2048] [--documents 1,8] [--json]
    python tools/bench/attention.py --device gpu --heads 32 --key_heads 4 --width 128

    masked        jax.nn.dot_product_attention as XLA computes it, causal and with a
                  mask [b, 1, t, t] of documents
    masked_cudnn  the same by cuDNN, which takes the mask as a bias (GPU)
    blocked, hopper, cudnn    moejax/kernels/attention; the last two need a GPU

A call is the attention of one layer, forward and backward, without its projections. The
forms of one length and number of documents take turns, and medians are shown. Documents
have random edges. Before that the results of each form are compared with those of the
first one. A form that declines, or lacks its device, is left out with the reason.

Memory is that of the compiled program, by XLA's own analysis: temporaries and results,
without arguments. Nothing is run for it. The exponent is the slope of its logarithm by
that of the length, over the lengths of --memory_lengths.

docs/bench_kernels.md explains the results. Exit codes: 0 done, 1 a form computes
something else, 2 bad input, 3 the machine failed.
"""

import argparse
import functools
import os
import pathlib
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this folder's modules are tools.x, never top-level names

from tools.bench.turns import median_sec  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import (  # noqa: E402
    CRASHED,
    DONE,
    emit,
    guarded,
    refuse,
    restart_with_huge_pages,
)

FORMS = ("masked", "masked_cudnn", "blocked", "hopper", "cudnn")
BASELINES = ("masked", "masked_cudnn")
"""Forms that get a mask, and no first keys."""
NEED_GPU = ("masked_cudnn", "hopper", "cudnn")
DTYPES = {"cpu": "float32", "gpu": "bfloat16"}
MAX_ERROR = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest ||x - y|| / ||y|| of an array of two forms. Both round to the dtype."""
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
    """A form computes something else than the first one."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if argv is None and args.device == "cpu":
        restart_with_huge_pages()
    if args.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="device to measure; gpu is the first GPU of this machine",
    )
    add("--forms", default=",".join(FORMS), help="forms with commas between")
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
    add(
        "--dtype",
        choices=tuple(MAX_ERROR),
        help="dtype of all arrays (default: float32 on a CPU, bfloat16 on a GPU)",
    )
    add(
        "--repeats",
        type=int,
        default=5,
        help="number of times that each program is measured; medians are kept",
    )
    add("--seed", type=int, default=0, help="random seed of arrays and documents")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    sizes = args.batch, args.heads, args.key_heads, args.width
    settings = Settings(args.device, args.dtype or DTYPES[args.device], *sizes)
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
    forms = parse_forms(args.forms)
    import jax

    try:
        device = jax.devices(args.device)[0]
    except RuntimeError:
        raise ValueError("--device gpu, but there is no GPU here: use cpu") from None
    here = find_here(forms, settings, [*lengths, *memory_lengths])
    record = {
        "device": device.device_kind,
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        **settings._asdict(),
        "repeats": args.repeats,
        "seed": args.seed,
        "declined": {form: why for form, why in here.items() if why},
        "times": [],
        "memory": [],
        "exponents": {},
    }
    forms = [form for form in forms if not here[form]]
    print(f"{record['device']}, {settings}, {args.repeats} repeats", flush=True)
    for form, why in record["declined"].items():
        print(f"{form} is left out: {why}", flush=True)
    rng = np.random.default_rng(args.seed)
    try:
        for t in lengths:
            for number in documents:
                rows = time_case(forms, settings, (t, number), args.repeats, rng)
                record["times"] += rows
                show_times(rows, is_first=len(record["times"]) == len(rows))
    except WrongResult as error:
        return refuse(error, CRASHED, args.json)
    for form in forms:
        rows = [memory_row(form, settings, t) for t in memory_lengths]
        record["memory"] += rows
        if len(rows) > 1:
            record["exponents"][form] = exponent(rows)
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


def parse_forms(text: str) -> list[str]:
    """Return the names of forms in `text`, with commas between."""
    forms = text.split(",")
    for form in forms:
        if form not in FORMS:
            raise ValueError(f"--forms has '{form}', which is none of {list(FORMS)}")
    return forms


def find_here(
    forms: Iterable[str], settings: Settings, lengths: Iterable[int]
) -> dict[str, str]:
    """Return, for each form, the reason why it cannot run here, or ''."""
    import jax

    reasons = {}
    for form in forms:
        reasons[form] = ""
        if form in NEED_GPU and settings.device != "gpu":
            reasons[form] = f"it needs a GPU, and --device is {settings.device}"
            continue
        for t in lengths:
            try:
                jax.eval_shape(make_call(form), *shapes(form, settings, t))
            except (NotImplementedError, RuntimeError) as error:
                reasons[form] = f"{t} tokens: {error}"
                break
    return reasons


def make_call(form: str):
    """Return call(q, k, v, dout, documents) -> the output and the gradients of queries,
    keys and values. The documents are a mask, or first keys."""
    import jax

    from moejax.kernels.attention import attention

    def call(q_bthi, k_bugi, v_bugi, dout_bthi, documents):
        if form in BASELINES:
            attend = functools.partial(
                jax.nn.dot_product_attention,
                mask=documents,
                is_causal=True,
                implementation="cudnn" if form == "masked_cudnn" else "xla",
            )
        else:
            attend = functools.partial(
                attention, first_bt=documents, implementation=form
            )
        out_bthi, vjp = jax.vjp(attend, q_bthi, k_bugi, v_bugi)
        return out_bthi, *vjp(dout_bthi)

    return call


def shapes(form: str, settings: Settings, t: int) -> list:
    """Return the shapes and dtypes of a call's arguments."""
    import jax
    import jax.numpy as jnp

    _, dtype, b, h, g, i = settings
    kept = (
        jax.ShapeDtypeStruct((b, 1, t, t), jnp.bool_)
        if form in BASELINES
        else jax.ShapeDtypeStruct((b, t), jnp.int32)
    )
    heads = h, g, g, h
    return [*(jax.ShapeDtypeStruct((b, t, n, i), dtype) for n in heads), kept]


@functools.cache
def compiled(form: str, settings: Settings, t: int):
    """Return the compiled call of a form."""
    import jax

    call = jax.jit(make_call(form))
    return call.lower(*shapes(form, settings, t)).compile()


def draw_first_keys(rng: np.random.Generator, t: int, number: int) -> np.ndarray:
    """Return the key [t] at which each token's document begins, for a window of
    `number` documents with random edges."""
    edges = np.sort(rng.choice(np.arange(1, t), number - 1, replace=False))
    begin_d = np.concatenate([[0], edges]).astype(np.int32)
    return np.repeat(begin_d, np.diff([*begin_d, t]))


def time_case(
    forms: list[str],
    settings: Settings,
    t_documents: tuple[int, int],
    repeats: int,
    rng: np.random.Generator,
) -> list[dict[str, Any]]:
    """Return a row for each form, with its time on the same arrays. Raises WrongResult
    if a form differs from the first one."""
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
    for form in forms:
        documents = jnp.asarray(first_bt)
        if form in BASELINES:
            documents = (documents[:, :, None] == documents[:, None, :])[:, None]
        program = compiled(form, settings, t)
        calls[form] = functools.partial(program, *args, documents)
    expected, errors = jax.device_get(calls[forms[0]]()), {}
    for form in forms:
        actual = jax.device_get(calls[form]())
        errors[form] = float(np.max(list(map(error_of, actual, expected))))  # keeps NaN
    check(errors, settings, t_documents)
    sec = median_sec(calls, repeats)
    return [
        {
            "form": form,
            "tokens": t,
            "documents": number,
            "msec": 1e3 * sec[form],
            "share_of_first": sec[form] / sec[forms[0]],
            "error": errors[form],
        }
        for form in forms
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
    for form, error in errors.items():
        if not error <= allowed:
            t, number = t_documents
            raise WrongResult(
                f"{form} differs from {next(iter(errors))} by {error:.2g} (allowed: "
                f"{allowed:.2g}) at {t} tokens and {number} documents"
            )


def memory_row(form: str, settings: Settings, t: int) -> dict[str, Any]:
    """Return the bytes of temporaries and results of a form's program."""
    memory = compiled(form, settings, t).memory_analysis()
    parts = memory.temp_size_in_bytes, memory.output_size_in_bytes
    names = "temporary_bytes", "result_bytes"
    return {"form": form, "tokens": t, **dict(zip(names, parts)), "bytes": sum(parts)}


def exponent(rows: list[dict[str, Any]]) -> float:
    """Return p of the fit bytes = c * tokens ** p."""
    tokens, sizes = ([row[name] for row in rows] for name in ("tokens", "bytes"))
    return float(np.polyfit(np.log(tokens), np.log(sizes), 1)[0])


def show_times(rows: list[dict[str, Any]], is_first: bool) -> None:
    """Print the rows of one case, with the head of the table before the first."""
    if is_first:
        print(f"\n| tokens | documents | form | ms | / {rows[0]['form']} | error |")
        print("|--:|--:|---|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row['tokens']} | {row['documents']} | {row['form']} "
            f"| {row['msec']:.2f} | {row['share_of_first']:.2f} | {row['error']:.1e} |",
            flush=True,
        )


def show_memory(record: dict[str, Any]) -> None:
    """Print the memory of each form by length, in MiB."""
    lengths = list(dict.fromkeys(row["tokens"] for row in record["memory"]))
    print(f"\n| MiB of | {' | '.join(map(str, lengths))} tokens | exponent |")
    print("|---|" + "--:|" * (len(lengths) + 1))
    for form in dict.fromkeys(row["form"] for row in record["memory"]):
        cells = [
            f"{row['bytes'] / 2**20:.1f}"
            for row in record["memory"]
            if row["form"] == form
        ]
        fit = record["exponents"].get(form)
        cells.append("" if fit is None else f"{fit:.2f}")
        print(f"| {form} | {' | '.join(cells)} |")
    print("", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
