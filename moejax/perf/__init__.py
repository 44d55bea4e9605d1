"""Predictions of seconds and bytes from a calibration: cost model, schedules, domains.

This package needs NumPy only. `moejax.balance` decides by its predictions.
"""
