"""Reading of gin files and bindings into a Config. Only this folder imports gin.

The fields of a Config and their rules are in moejax/config.py.
"""
