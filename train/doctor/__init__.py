"""Checks of the devices before a run trains: kernels and collectives against their
definitions.

Not here: what quarantines a kernel for later runs (moejax/kernels/quarantine.py), and
the comparison of replicas while a run trains (train/replicas).
"""
