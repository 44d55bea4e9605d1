"""Rows from tokens to a buffer and back, by gathers alone, forward and backward."""

from moejax.kernels.permute.xla import combine_rows, gather_rows

__all__ = ["combine_rows", "gather_rows"]
