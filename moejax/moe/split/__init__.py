"""Which replica of an expert a row goes to, decided on devices in int32.

The NumPy definitions are in `moejax.plan`; how rows travel is in `moejax.moe.exchange`.
"""
