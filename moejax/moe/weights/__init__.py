"""Expert weights on their way to slots, and gradients on their way back to the owners.

The transport of rows belongs in `moejax.moe.exchange`.
"""
