"""Plant wrong kernels and collectives, for tests of what finds and replaces them.

A CPU has no kernel that another one could replace. So the Hopper kernels seem to be
usable, and are replaced by the portable ones, of which one may be wrong.

    python tests/support/planted.py FAULT INDEX train/main.py ARGS..

runs a program whose devices are checked at start. On process INDEX the product 'wgrad'
is wrong (FAULT 'wrong'), or collectives are never run ('silent').
"""

import pathlib
import runpy
import sys
import time

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
    monkeypatch.setattr(kernels, "products", lambda **options: planted)
    choose._make_products.cache_clear()
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
    """Plant a fault and run a program, as the module says."""
    import pytest

    sys.path[0] = str(ROOT)
    fault, index, program, *args = sys.argv[1:]
    sys.argv = [program, *args]
    from train.doctor import doctor
    from train.launch import coordinator

    monkeypatch = pytest.MonkeyPatch()
    plant_hopper(monkeypatch)

    def is_for(run) -> bool:
        if coordinator.own_index() == int(index):
            if fault == "wrong":
                plant_hopper(monkeypatch, wgrad=wrong_wgrad)
            else:
                monkeypatch.setattr(
                    doctor, "run_collectives", lambda *_: time.sleep(9e9)
                )
        return True

    monkeypatch.setattr(doctor, "is_for", is_for)
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
