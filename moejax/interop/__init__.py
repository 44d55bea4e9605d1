"""Published checkpoints: folders of config.json and safetensors, read slice by slice as
our configuration and parameters, and written.

Runs, optimizers and programs belong in `train` and `tools`. docs/interop.md begins with
examples. Modules from top to bottom:

    published, export      a folder as a model, and a model as a folder
    architecture           config.json as fields of a model
    families               a table each: settings (settings, layer_keys, rope_json over
                           config_json, fields) and rows (rows)
    source, tree           tensors of a folder as weights, and as a tree of parameters
    arrays                 views as arrays on devices
    views, quantized       arrays that are not read yet
    folder, write, header  files
"""
