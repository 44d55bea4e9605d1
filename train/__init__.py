"""Programs that train, evaluate and generate with `moejax`.

Code that would serve another loop, model or optimizer too is in `moejax`.
"""
