"""Write a tiny published model: a folder of Qwen3-MoE with random weights."""

import functools
import json
import pathlib

import numpy as np

from moejax.config import Config, Model, Moe, Train
from moejax.interop.export import write_model
from tests.support.plain_model import network
from train.data.tokenizer import byte_tokenizer_file

CONFIG = Config(
    model=Model(
        vocab_size=256,
        d_model=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        d_ff=32,
        qk_norm="head",
        compute_dtype="float32",
    ),
    moe=Moe(num_experts=8, top_k=2, d_expert=32),
    train=Train(batch_size=8),
)
NUM_BYTES = 265_088
"""Bytes of the tensors in float32."""


def write_published(folder: pathlib.Path, max_shard_bytes: int = 10**9) -> pathlib.Path:
    """Write the folder, with a tokenizer of bytes, and return it."""
    made = network(CONFIG)
    ids = json.dumps({"bos_token_id": 0, "eos_token_id": [0, 3]}).encode()
    files = {"tokenizer.json": _tokenizer(), "generation_config.json": ids}
    write_model(
        folder,
        CONFIG.network,
        made.params,
        {key: _arrays(value) for key, value in made.bias.items()},
        dtype="float32",
        max_shard_bytes=max_shard_bytes,
        files=files,
    )
    return folder


@functools.cache
def _tokenizer() -> bytes:
    return byte_tokenizer_file()


def _arrays(tree):
    if isinstance(tree, dict):
        return {key: _arrays(value) for key, value in tree.items()}
    return np.asarray(tree)
