"""Compile the Hopper kernels without a GPU, and print what ptxas and SASS say of each.

    python tools/kernel_code.py
    python tools/kernel_code.py --shapes olmoe_1b_7b,deepseek_v3 --passes wgrad
    python tools/kernel_code.py --shapes olmoe_1b_7b --tiles 'span=4 stages=3' --json

The kernels of the grouped products, in the default tiles or with some fields of them
changed (--tiles), and of the other operations (--others). A kernel takes two to five
seconds. docs/kernels.md explains the figures. `make aot-wheels` installs what
the tool needs.

Exit codes: 0 done, 2 bad input. A kernel that cannot be compiled is no bad input: its
row says why.
"""

import argparse
import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from moejax.kernels.shapes import MODEL_SHAPES  # noqa: E402
from moejax.kernels.tuning import Tiles  # noqa: E402
from moejax.perf import target  # noqa: E402
from tools.bench import program  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402

COLUMNS = (
    "shape", "kernel", "tiles", "registers", "spilled", "shared", "HGMMA",
    "instructions", "cycles", "BAR", "fences", "MUFU", "remarks",
)  # fmt: skip
"""HGMMA, instructions and cycles are those of a stage, where a slash parts computing
and copying warpgroups. BAR has the barriers of a stage, and those of the whole kernel;
fences and MUFU are of the whole kernel."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add(
        "--shapes",
        default="all",
        help="shapes with commas, of moejax/kernels/shapes.py",
    )
    add("--passes", default="all", help="passes with commas, or none")
    add(
        "--tiles",
        default="",
        metavar="FIELDS",
        help="fields of Tiles to change, such as 'stages=3 chunk=64'",
    )
    add("--others", default="none", help="other kernels with commas, all or none")
    add("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    add("--target", default="h100", help="GPU to compile for, as in tools/aot.py")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    from tools.compiled import kernel_code

    gpu = target.load(args.target)
    kernel_code.set_up()
    import jax

    from tools.compiled import kernel_cases

    shapes = names("shapes", args.shapes, MODEL_SHAPES)
    passes = names("passes", args.passes, kernel_cases.PRODUCTS)
    others = names("others", args.others, kernel_cases.OTHERS)
    changes = fields(args.tiles), args.dtype
    cases = [
        (which, shape, partial(kernel_cases.product, shape, which, *changes))
        for shape, which in itertools.product(shapes, passes)
    ]
    cases += [(name, "", partial(kernel_cases.other, name)) for name in others]
    about = {
        "target": gpu.name,
        "dtype": args.dtype,
        "ptxas": kernel_code.ptxas_version(),
        "jax": jax.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in about.items()))
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    rows = []
    for case in cases:
        for row in records(*case, gpu):
            rows.append(row)
            print(line(row), flush=True)
    emit(about | {"kernels": rows}, args.json)
    return DONE


def records(
    name: str, shape: str, make: Callable, gpu: target.Target
) -> list[dict[str, Any]]:
    """Return the figures of the kernels of the case that `make` returns, or one row
    with the reason why there are none."""
    from tools.compiled.kernel_code import compile_kernels

    about = {"case": name, "shape": shape, "tiles": None}
    try:
        tiles, function, arguments = make()
        about["tiles"] = stated_tiles(tiles) if tiles else None
        kernels = compile_kernels(function, arguments, gpu)
    except (ValueError, NotImplementedError) as error:
        return [about | {"refused": " ".join(str(error).split())[:300]}]
    return [about | kernel.record() for kernel in kernels]


def stated_tiles(tiles: Tiles) -> dict[str, Any]:
    """Return rows and columns of tiles, and the other fields that are not at their
    default."""
    return {
        field.name: value
        for field in dataclasses.fields(tiles)
        if (value := getattr(tiles, field.name)) != field.default
    }


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    tiles = row["tiles"]
    about = [row["shape"] or "-", row["case"]]
    if "refused" in row:
        return f"| {' | '.join(about)} | {format_tiles(tiles)} | {row['refused']} |"
    if not row["shape"]:
        about[-1] = row["kernel"]
    computing = row["computing"] or {}
    cells = [
        *about,
        format_tiles(tiles),
        row["registers"],
        row["spill_store_bytes"] + row["spill_load_bytes"],
        row["shared_bytes"],
        computing.get("products", "-"),
        *(_per_stage(row, name) for name in ("instructions", "issue_cycles")),
        f"{_per_stage(row, 'barriers')} / {row['barriers']}",
        row["fences"],
        row["specials"],
        " ".join(row["codes"]) or "-",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _per_stage(row: dict[str, Any], figure: str) -> str:
    """Return a figure of the two loops, for one stage. ptxas may unroll a loop; each
    stage of a copying loop waits once for an empty slot."""
    computing, copying = row["computing"], row["copying"]
    of_computing = computing[figure] if computing else "-"
    of_copying = round(copying[figure] / max(1, copying["waits"])) if copying else "-"
    return f"{of_computing} / {of_copying}"


def format_tiles(tiles: dict[str, Any] | None) -> str:
    """Return tiles as text: 128 x 256, and the other fields that are stated."""
    if tiles is None:
        return "-"
    others = {name: v for name, v in tiles.items() if name not in ("rows", "columns")}
    sizes = f"{tiles['rows']} x {tiles['columns']}"
    return " ".join([sizes, *(f"{name}={value}" for name, value in others.items())])


def names(flag: str, text: str, known) -> list[str]:
    """Return the names of a list with commas, of 'all' or of 'none'. Raises ValueError
    for an unknown one."""
    return [] if text == "none" else program.parse_names(flag, text, known)


def fields(text: str) -> dict[str, Any]:
    """Return the fields of --tiles: 'stages=3 halves=rows' is {'stages': 3, 'halves':
    'rows'}. Raises ValueError for an unknown field, or one without a value."""
    found, known = {}, [field.name for field in dataclasses.fields(Tiles)]
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in known or not value:
            raise ValueError(
                f"--tiles={text!r}: {word!r} must be field=value, with a field of "
                f"{', '.join(known)}"
            )
        found[name] = int(value) if value.isdigit() else value
    return found


if __name__ == "__main__":
    sys.exit(main())
