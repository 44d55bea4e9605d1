"""The grouped product on Hopper GPUs: Pallas kernels and the tables that they read.

`kernels.py` has what the rest of `grouped_dot` calls; the portable form is next door.
"""
