"""Files and lines that a run writes while it goes, and its claim on their directory.

Checkpoints are written by `train.checkpoint`, and the end of a run by `train.summary`.
"""
