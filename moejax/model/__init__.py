"""The network around the MoE layer: attention, blocks, the transformer, its FLOPs.

Experts and how rows reach them belong in `moejax.moe`.
"""
