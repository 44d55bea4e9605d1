"""Loss of a model on any text, text that it continues, and a baseline beside its loss.

Programs around these are train/evaluate.py, train/generate.py and the loop of a run.
"""
