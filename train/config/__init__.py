"""From gin files and bindings to a Config. Only this folder imports gin.

What a Config holds, and its rules, are in moejax/config.py.
"""
