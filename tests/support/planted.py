"""Plant wrong kernels and collectives, for tests of what finds and replaces them.

A CPU has no kernel that another one could replace. So the Hopper kernels seem to be
usable, and are replaced by the portable ones, of which one may be wrong.

    python tests/support/planted.py INDEX train/main.py ARGS..

runs a program whose product 'wgrad' is wrong on process INDEX.
"""

import pathlib
import runpy
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def plant_hopper(monkeypatch, **wrong) -> None:
    """Let the Hopper kernels of grouped products seem usable, and let them be the
    portable ones, with the products `wrong` in their place."""
    from moejax.kernels.grouped_dot import choose, portable
    from moejax.kernels.grouped_dot.hopper import kernels

    own = portable.products(None)
    monkeypatch.setattr(choose, "why_not_hopper", lambda: None)
    monkeypatch.setattr(kernels, "declines", lambda *args, **options: None)
    planted = own._replace(**{name: make(own) for name, make in wrong.items()})
    monkeypatch.setattr(kernels, "products", lambda fp8: planted)
    choose.products.cache_clear()
    choose._replace_products.cache_clear()


def wrong_wgrad(own):
    """Return a gradient of matrices that forgets the last row of each group."""
    import jax.numpy as jnp

    def wgrad(x_md, dy_mf, rows_g):
        last_g = jnp.where(rows_g > 0, jnp.cumsum(rows_g) - 1, len(x_md))
        return own.wgrad(x_md.at[last_g].set(0, mode="drop"), dy_mf, rows_g)

    return wgrad


def swap_ends(send):
    """Return a transport whose first and last chunk arrive in each other's place."""

    def swapped(rows_wcd, count_w, incoming_w, axis):
        rows_wcd = send(rows_wcd, count_w, incoming_w, axis)
        first, last = rows_wcd[0], rows_wcd[-1]
        return rows_wcd.at[0].set(last).at[-1].set(first)

    return swapped


def main() -> None:
    """Plant a wrong product and run a program, as the module says."""
    import pytest

    sys.path[0] = str(ROOT)
    index, program, *args = sys.argv[1:]
    sys.argv = [program, *args]
    from train.doctor import doctor
    from train.launch import coordinator

    monkeypatch = pytest.MonkeyPatch()

    def is_for(run) -> bool:
        is_wrong = coordinator.own_index() == int(index)
        plant_hopper(monkeypatch, **({"wgrad": wrong_wgrad} if is_wrong else {}))
        return True

    monkeypatch.setattr(doctor, "is_for", is_for)
    from moejax.kernels.grouped_dot import choose

    monkeypatch.setattr(choose, "why_not_hopper", lambda: None)
    plant_hopper(monkeypatch)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
