"""Grouped matrix product: rows sorted by group, each group with a matrix of its own.

reference.py                    the definition
blocked.py, blocked_swiglu.py   any XLA device
hopper.py                       Hopper GPUs, by two kernels:
  rows_kernel.py, row_tiles.py    rows as result, and which rows a tile has
  wgrad_kernel.py                 matrices as result
  ring.py                         what both share
products.py                     the products of each implementation
vjp.py                          choice and gradients
"""

from moejax.kernels.grouped_dot.vjp import grouped_dot, grouped_swiglu

__all__ = ["grouped_dot", "grouped_swiglu"]
