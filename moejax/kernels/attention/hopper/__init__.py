"""Attention on Hopper GPUs, in blocks that somebody reads.

kernels.py         the two passes, and what they decline
scores.py          code of all kernels: tables of blocks, scores, masks, the launch
forward_kernel.py  output and the logarithm of the softmax's sum
dq_kernel.py       gradient of queries
dkv_kernel.py      gradients of keys and values
"""
