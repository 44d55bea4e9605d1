"""Grouped matrix product: rows sorted by group, each group with a matrix of its own.

reference.py                    the definition
blocked.py                      any XLA device
hopper.py                       Hopper GPUs, by two kernels:
  rows_kernel.py, row_tiles.py    rows as result, and which rows a tile has
  fp8_kernel.py                   the same of 8-bit values
  wgrad_kernel.py                 matrices as result
  ring.py                         what all share
fp8.py                          8-bit values with scales, and what they stand for
swiglu.py                       SwiGLU after products that do not fuse it
products.py                     the products of each implementation
vjp.py                          choice and gradients
"""

from moejax.kernels.grouped_dot.vjp import grouped_dot, grouped_swiglu

__all__ = ["grouped_dot", "grouped_swiglu"]
