"""Checkpoints: written, verified and read on any mesh; which run one may continue.

Other files of a run directory are written by `train.logs`.
"""
