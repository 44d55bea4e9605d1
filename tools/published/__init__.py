"""The commands of tools/hf.py, a file each: published models in and out of runs.

Formats of files belong in moejax/interop, runs in train.
"""
