"""Flags, start and checks that several programs of tools/bench have in common."""

import argparse
import difflib
import pathlib
import subprocess
from collections.abc import Callable, Iterable

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


def run(
    work: Callable[[argparse.Namespace], int],
    args: argparse.Namespace,
    *,
    is_gpu: bool,
    has_huge_pages: bool = False,
) -> int:
    """Do the work of a program and return its exit code.

    JAX compiles into the project's cache, and does not look for GPUs unless `is_gpu`.
    With `has_huge_pages` a program for the CPU starts again with huge pages.
    """
    if has_huge_pages and not is_gpu:
        restart_with_huge_pages()
    import jax

    if not is_gpu:
        jax.config.update("jax_platforms", "cpu")
    if not jax.config.jax_compilation_cache_dir:
        folder = str(ROOT / ".cache" / "jax")
        jax.config.update("jax_compilation_cache_dir", folder)
    with guarded(as_json=args.json) as ending:
        return work(args)
    return ending.code


def devices(kind: str) -> list:
    """Return the devices of this machine that are a 'cpu' or a 'gpu'. Raises ValueError
    if there are none."""
    import jax

    try:
        return jax.devices(kind)
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
