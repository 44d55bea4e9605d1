"""Compiled train and evaluation steps: state, loss, gradients and optimizer.

Nothing here works on the host's side of a run.
"""
