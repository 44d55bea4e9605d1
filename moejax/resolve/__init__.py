"""Resolution of a configuration: one value in which each 'auto' and None has an answer.

`resolve(cfg, mesh)` makes it at the start of a program; the layers below take it, or a
part of it. Fields that a user can write belong in `moejax.config`, predictions of time
in `moejax.perf`.
"""
