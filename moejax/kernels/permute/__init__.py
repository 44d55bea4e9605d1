"""Row permutations: move rows from tokens to a buffer and back.

Forward and backward passes use gathers alone.

reference.py    the definition, differentiated by JAX
portable.py     plain XLA operations, on any device
hopper.py       Pallas kernels (Mosaic GPU), for Hopper
choose.py       which of them a device and a row width get
vjp.py          the public functions and their gradients
"""

from moejax.kernels.permute.vjp import combine_rows, gather_rows, sum_rows

__all__ = ["combine_rows", "gather_rows", "sum_rows"]
