"""Layouts, expert plans and the definitions of the splits, in NumPy.

The host and the device code both import this package; it is their contract. Code that
runs on devices belongs in `moejax.moe`.
"""
