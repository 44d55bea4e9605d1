"""How expert weights reach the slots, and how their gradients reach the masters.

How rows travel belongs in `moejax.moe.exchange`.
"""
