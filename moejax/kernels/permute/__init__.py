"""Rows from tokens to a buffer and back, by gathers alone, forward and backward.

reference.py    the definition, differentiated by JAX
portable.py     plain XLA operations, on any device
hopper.py       Pallas kernels (Mosaic GPU), for Hopper
choose.py       which of them a device and a width get
vjp.py          the public functions and their gradients
"""

from moejax.kernels.permute.vjp import combine_rows, gather_rows

__all__ = ["combine_rows", "gather_rows"]
