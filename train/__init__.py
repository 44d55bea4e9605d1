"""The programs that train, evaluate and generate; the first user of `moejax`.

What would serve another loop, model or optimizer is in `moejax`.
"""
