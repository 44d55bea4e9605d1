"""The contract between host and device, in NumPy: layouts, expert plans, and the
definitions of the splits. What computes on devices belongs in `moejax.moe`.
"""
