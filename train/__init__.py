"""The programs that train, evaluate and generate, and the rooms that they are made of.

What somebody else's training loop could use belongs in `moejax`.
"""
