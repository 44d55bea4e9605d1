"""The balancer in a run: observes loads, adopts plans and layouts between two steps.

What it decides is in `moejax.balance`.
"""
