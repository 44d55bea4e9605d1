"""The balancer, which turns observed loads into plans and layouts for all processes.

It is pure, deterministic and needs NumPy only. `moejax.perf` predicts the cost of a
plan; `train.balance` and `moejax.moe` put it on devices.
"""
