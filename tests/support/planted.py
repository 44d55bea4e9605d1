"""Plant wrong products and transports, for tests of what finds them.

    python tests/support/planted.py INDEX train/main.py ARGS..

runs `train/main.py ARGS.. --check`, with a wrong product on process INDEX.
"""

import functools
import os
import pathlib
import runpy
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def plant_product(monkeypatch, which: str, wrong) -> None:
    """Let the checks of kernels find `wrong` in the place of a product. It is called
    with the right product before its arguments."""
    from moejax.kernels import cases
    from moejax.kernels.grouped_dot import portable

    own = portable.products(None)
    product = functools.partial(wrong, getattr(own, which))
    planted = own._replace(**{which: product})
    monkeypatch.setattr(cases, "products", lambda *args, **options: planted)


def swap_ends(send):
    """Return a transport whose first and last chunk arrive in each other's place."""

    def swapped(rows_wcd, count_w, incoming_w, axis):
        rows_wcd = send(rows_wcd, count_w, incoming_w, axis)
        first, last = rows_wcd[0], rows_wcd[-1]
        return rows_wcd.at[0].set(last).at[-1].set(first)

    return swapped


def main() -> None:
    """Plant a wrong product and check devices, as the module says."""
    import pytest

    sys.path[0] = str(ROOT)
    index, program, *args = sys.argv[1:]
    sys.argv = [program, *args, "--check"]
    if os.environ.get("MOEJAX_PROCESS_ID") == index:
        plant_product(
            pytest.MonkeyPatch(), "wgrad", lambda own, *args: 1.1 * own(*args)
        )
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
