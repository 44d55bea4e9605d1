"""Trackers: TensorBoard, Weights & Biases and MLflow, in a process beside process 0.

What a run records itself is written by `train.logs.records`.
"""
