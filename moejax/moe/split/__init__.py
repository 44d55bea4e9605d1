"""Splits: the choice of the replica that computes each row, on devices in int32.

The NumPy definitions are in `moejax.plan`. The transport of rows is in
`moejax.moe.exchange`.
"""
