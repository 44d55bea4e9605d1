"""Attention over documents: which keys a query reads is a range, and blocks that nobody
reads are skipped.

reading.py     the range of keys of each query, from documents, causality and a window
reference.py   the definition
portable.py    loops over blocks ('blocked'), on any XLA device
cudnn.py       cuDNN's kernel for packed documents, on NVIDIA GPUs
choose.py      which implementation a device and its arrays get
vjp.py         the public function, its gradients, and sinks
"""

from moejax.kernels.attention.reading import Rule
from moejax.kernels.attention.vjp import attention

__all__ = ["Rule", "attention"]
