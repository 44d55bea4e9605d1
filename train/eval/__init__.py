"""Evaluation: the loss of a model on any text, text generation, and a trigram baseline.

train/evaluate.py, train/generate.py and the loop of a run use this package.
"""
