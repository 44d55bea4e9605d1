"""The grouped product on Hopper GPUs: Pallas kernels and the tables that they read.

kernels.py        the products, and which arrays they decline
rows_kernel.py    the kernel whose result is rows (forward and dgrad)
rows_store.py     its epilogue
row_tiles.py      the table of its tiles
fp8_kernel.py     the same kernel for 8-bit values
wgrad_kernel.py   the kernel whose result is matrices (wgrad)
ring.py           the ring of shared-memory slots, and other code that all kernels use

The implementation for other devices is ../portable.py.
"""
