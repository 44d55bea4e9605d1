"""The network around the MoE layer: attention, blocks, the transformer, its FLOPs.

Experts, and the way rows reach them, belong in `moejax.moe`.
"""
