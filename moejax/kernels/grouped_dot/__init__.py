"""Grouped matrix product: rows sorted by group, each group with a matrix of its own.

reference.py    the definition
portable.py     loops over blocks ('blocked'), on any XLA device
hopper/         Pallas kernels for Hopper GPUs
products.py     what each implementation has, and SwiGLU where it fuses none
fp8.py          8-bit values with scales, and what they stand for
choose.py       which implementation a device and a shape get
vjp.py          the public functions and their gradients
"""

from moejax.kernels.grouped_dot.vjp import grouped_dot, grouped_swiglu

__all__ = ["grouped_dot", "grouped_swiglu"]
