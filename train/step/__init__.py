"""Compiled train and evaluation steps: state, loss, gradients and optimizer.

Work of the host during a run (logs, checkpoints, balancing) is in other packages.
"""
