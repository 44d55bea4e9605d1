"""Grouped matrix product: rows sorted by group, each group with a matrix of its own.

In the MoE layer a group is one expert's slot, and its rows are the tokens routed there.

reference.py    the definition
portable.py     loops over blocks of rows ('blocked'), on any XLA device; blocks.py
hopper/         Pallas kernels for Hopper GPUs
products.py     what an implementation provides: products, unfused SwiGLU, experts
fp8.py          conversion to 8-bit values with block scales, and back
choose.py       which implementation a device and a shape get
vjp.py          the public functions and their gradients
"""

from moejax.kernels.grouped_dot.vjp import grouped_dot, grouped_swiglu

__all__ = ["grouped_dot", "grouped_swiglu"]
