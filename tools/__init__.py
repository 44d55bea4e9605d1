"""Programs that a user runs beside training.

They prepare data, calibrate the cost model, replay loads, draw plots, launch workers
and run benchmarks.
"""
