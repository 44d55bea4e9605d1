"""The MoE layer on devices: routing, exchange of rows, experts, and the way back.

It consists of free functions on arrays, inside one `shard_map`, and of the layer that
calls them. The host's decisions (layouts, plans) belong in `moejax.plan`, kernels in
`moejax.kernels`, and the rest of a model in `moejax.model`.
"""
