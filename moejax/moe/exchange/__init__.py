"""Transport of rows to their experts and back: manifest, dispatch, rounds, schedules.

The transport of expert weights to slots belongs in `moejax.moe.weights`.
"""
