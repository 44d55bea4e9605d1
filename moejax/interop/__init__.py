"""Published checkpoints: folders of config.json and safetensors, read slice by slice as
our configuration and parameters, and written.

Runs, optimizers and programs belong in `train` and `tools`. docs/interop.md begins with
examples. Modules from top to bottom:

    published, export      a folder as a model, and a model as a folder
    architecture, families config.json and tensors of each family: settings, table, tree
    arrays                 views as arrays on devices
    views, quantized       arrays that are not read yet
    folder, write, header  files
"""
