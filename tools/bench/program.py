"""Flags, start and checks that several programs of tools/bench have in common."""

import argparse
import difflib
import os
import pathlib
import subprocess
from collections.abc import Callable, Iterable, Sequence

from moejax.config import Config
from train.launch.program import guarded, restart_with_huge_pages

ROOT = pathlib.Path(__file__).resolve().parents[2]
DTYPES = {"cpu": "float32", "gpu": "bfloat16"}
"""Default dtype of all arrays, by --device."""


def add_device(parser: argparse.ArgumentParser, dtypes: Iterable[str]) -> None:
    """Add --device, and --dtype, whose default DTYPES has."""
    parser.add_argument(
        "--device",
        choices=tuple(DTYPES),
        default="cpu",
        help="device to measure; gpu is the first GPU of this machine",
    )
    parser.add_argument(
        "--dtype",
        choices=tuple(dtypes),
        help="dtype of all arrays (default: float32 on a CPU, bfloat16 on a GPU)",
    )


def add_repeats(parser: argparse.ArgumentParser, default: int) -> None:
    """Add --repeats."""
    parser.add_argument(
        "--repeats",
        type=int,
        default=default,
        help="number of times that each program is measured; medians are kept",
    )


def add_variants(parser: argparse.ArgumentParser, when: str) -> None:
    """Add --variant, a list; `when` says of which runs it is."""
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        help=f"{when}: name and settings of a variant: 'name: Class.field = value; ..';"
        " repeated for each variant, the reference first",
    )


def read_variants(
    args: argparse.Namespace, params: Sequence[str] = ()
) -> dict[str, Config]:
    """Return the configuration of each --variant, by name: that of --gin_file with
    --gin_param, then `params`, then the variant's own settings.

    Raises ValueError for fewer than two names.
    """
    from train.config import gin_reader  # gin is not needed where kernels alone are

    cfgs = {}
    for text in args.variant:
        name, _, settings = text.partition(":")
        own = [setting.strip() for setting in settings.split(";") if setting.strip()]
        every = [*args.gin_param, *params, *own]
        cfgs[name.strip()] = gin_reader.load(args.gin_file, every)
    if len(cfgs) < 2:
        raise ValueError("give at least two --variant with different names")
    return cfgs


def run(
    work: Callable[[argparse.Namespace], int],
    args: argparse.Namespace,
    *,
    is_gpu: bool,
    has_huge_pages: bool = False,
) -> int:
    """Do the work of a program and return its exit code.

    JAX reads the variables that are set here when it is imported, which only `work`
    does. With `has_huge_pages` a program for the CPU starts again with huge pages.
    """
    if not is_gpu:
        if has_huge_pages:
            restart_with_huge_pages()
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    return guarded(lambda: work(args), as_json=args.json)


def first_device(kind: str):
    """Return the first device of this machine that is a 'cpu' or a 'gpu'. Raises
    ValueError without one."""
    import jax

    try:
        return jax.devices(kind)[0]
    except RuntimeError:
        raise ValueError(f"there is no {kind.upper()} here: use cpu") from None


def parse_names(option: str, text: str, known: Iterable[str]) -> list[str]:
    """Return the names in `text`, with commas between, in their order; or all known
    names for 'all'. Raises ValueError for an unknown name."""
    if text == "all":
        return list(known)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)
            raise ValueError(
                f"--{option} has '{name}', which is none of {', '.join(known)} here: "
                f"did you mean '{near[0]}'?"
            )
    return names


def commit() -> str:
    """Return the short name of the commit that is checked out, with a + if files differ
    from it; 'unknown' outside a repository."""
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.check_output(
            [*git, "rev-parse", "--short", "HEAD"], text=True
        )
        changed = subprocess.check_output([*git, "status", "--porcelain"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.strip() + ("+" if changed.strip() else "")
