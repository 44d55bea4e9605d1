"""Files of published checkpoints: folders of safetensors, read slice by slice into
arrays on devices, and written.

Runs, optimizers and programs belong in `train` and `tools`. docs/interop.md begins with
an example.
"""
