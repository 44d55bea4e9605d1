"""The balancer: from observed loads to plans and layouts that all processes adopt.

NumPy, pure and deterministic. What a plan costs is predicted in `moejax.perf`; how it
gets onto devices is in `train.balance` and `moejax.moe`.
"""
