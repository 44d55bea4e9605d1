"""The files and lines that a run writes, and its claim on the run directory.

Checkpoints are written by `train.checkpoint`, and the summary by `train.summary`.
"""
