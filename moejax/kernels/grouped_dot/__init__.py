"""Grouped matrix product: rows sorted by group, each group with a matrix of its own."""

from moejax.kernels.grouped_dot.vjp import grouped_dot

__all__ = ["grouped_dot"]
