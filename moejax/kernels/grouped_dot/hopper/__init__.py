"""The grouped product on Hopper GPUs: Pallas kernels and the tables that they read.

kernels.py                      the products, and what they decline
rows_kernel.py, row_tiles.py    rows as result, and which rows a tile has
fp8_kernel.py                   the same of 8-bit values
wgrad_kernel.py                 matrices as result
ring.py                         what the kernels share

The portable form is next door.
"""
