"""What a run is once 'auto' and None are answered: one value, made at the start.

`resolve(cfg, mesh)` makes it; everything below the programs takes it, or a part of it.
What a user may write belongs in `moejax.config`, what
predicts seconds in `moejax.perf`.
"""
