"""The balancer in a run: observes loads, adopts plans and layouts between two steps.

The decisions are made in `moejax.balance`.
"""
