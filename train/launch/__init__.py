"""The begin and the end of a program, and how the processes of a run meet and agree.

Nothing here depends on models, data or the files of a run.
"""
