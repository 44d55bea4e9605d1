"""How rows travel to their experts and back: manifest, dispatch, rounds, schedules.

How expert weights reach the slots belongs in `moejax.moe.weights`.
"""
