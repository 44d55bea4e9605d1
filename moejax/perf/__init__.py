"""Seconds and bytes, predicted from a calibration: cost model, schedules and domains.

NumPy only. What to do about a prediction is decided in `moejax.balance`.
"""
