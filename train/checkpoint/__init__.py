"""Checkpoints: save, verify and restore them on any mesh; rules for resuming a run.

The other files of a run directory are written by `train.logs`.
"""
