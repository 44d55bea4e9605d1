"""Checkpoints: save, verify and restore them on any mesh, and check who may resume.

The other files of a run directory are written by `train.logs`.
"""
