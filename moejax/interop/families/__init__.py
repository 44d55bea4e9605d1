"""Families of published models: a file each, with settings (config.json) and rows
(tensors), both read in both directions.

How tensors are read and written belongs in `moejax.interop`; a family is data.
"""
