"""How programs begin and end, and how the processes of a run meet and agree.

Nothing here knows of models, data or files of a run.
"""
