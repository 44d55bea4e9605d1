"""Checks of the devices before a run trains: kernels and collectives against their
definitions.

Not here: the comparison of replicas while a run trains (train/replicas.py).
"""
