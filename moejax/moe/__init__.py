"""The hot path: what one MoE layer computes on devices, from tokens to tokens.

Free functions on arrays, inside one `shard_map`, and the layer that calls them. What
the host decides beforehand (layouts, plans) belongs in `moejax.plan`, the kernels in
`moejax.kernels`, and the rest of a model in `moejax.model`.
"""
