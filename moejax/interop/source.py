"""Tensors of a published folder as weights: decoded if they are quantised, and all
accounted for."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from moejax.config import Network
from moejax.interop import fused, quantized, views
from moejax.interop.config_json import ConfigJson
from moejax.interop.families import EMBEDDING, HEAD, Family
from moejax.interop.folder import TensorFolder
from moejax.interop.strict_json import quoted
from moejax.interop.views import View

FP8, MXFP4 = "fp8", "mxfp4"
NUMBER = re.compile(r"\.\d+(?=\.)")
BUFFERS = re.compile(r"\.rotary_emb\.inv_freq$")
"""Names of tensors that are no weights."""
EXTRA_BLOCKS = re.compile(r"(^|\.)mtp[._]")
"""Names of tensors for multi-token prediction outside of layers."""


def quantization(config: ConfigJson) -> str | None:
    """Return how weights are quantised, by quantization_config: FP8, MXFP4 or None.

    Raises ValueError for other ways than blocks of 128 x 128 in e4m3 and MXFP4.
    """
    found = config.object("quantization_config")
    if found is None:
        return None
    kind = found.choice("quant_method", {FP8: FP8, MXFP4: MXFP4})
    for key in ("modules_to_not_convert", "activation_scheme", "scale_fmt"):
        found.take(key)
    if kind == FP8:
        found.only("fmt", "e4m3")
        found.only("weight_block_size", [quantized.BLOCK, quantized.BLOCK])
        if "weight_block_size" not in found:
            raise found.error("weight_block_size", "is missing: [128, 128] is read")
    found.finish(frozenset(["dequantize"]))
    return kind


class Source:
    """The tensors of a folder, and which of them are in use."""

    def __init__(
        self,
        folder: TensorFolder,
        family: Family,
        network: Network,
        quantized_as: str | None,
    ):
        self._folder, self._family, self._kind = folder, family, quantized_as
        self._network = network
        self._unused = set(folder.arrays)
        self._dtypes: dict[str, dict[str, str]] = {}
        """A tensor of each dtype, by the name without numbers of layers and experts."""
        prefix = family.text_prefix
        self._prefix = prefix if prefix + EMBEDDING in folder.arrays else ""

    def tensor(self, name: str, shape: tuple[int, ...]) -> View:
        """Return a tensor as weights, in float32 if some of the folder are quantised:
        then layers may differ. Raises ValueError if it is missing, or has another
        shape, or a dtype that is none of weights."""
        view = self._weights(self._prefix + name, shape)
        return view if self._kind is None else views.cast(view, np.dtype(np.float32))

    def _weights(self, name: str, shape: tuple[int, ...]) -> View:
        if self._kind == MXFP4 and f"{name}_blocks" in self._folder.arrays:
            return self._mxfp4(name, shape)
        view = self._view(name, shape)
        scale = name + "_scale_inv"
        if self._kind == FP8 and len(shape) > 1 and scale in self._folder.arrays:
            self._unused.discard(scale)
            scales = self._folder.view(scale)
            if scales.dtype.name == "bfloat16":  # as Qwen3 has them
                scales = views.cast(scales, np.dtype(np.float32))
            return quantized.fp8_blocks(view, scales)
        if view.dtype.itemsize < 2 or not np.issubdtype(
            views.numpy_dtype(view.dtype), np.floating
        ):
            missing = "quantization_config in config.json does not say what it is"
            if self._kind == FP8:
                missing = f"there is no {quoted(scale)}"
            raise ValueError(
                f"{view.label} is {view.dtype}, which is no dtype of weights, and "
                + missing
            )
        return view

    def _view(self, name: str, shape: tuple[int, ...]) -> View:
        place = fused.place_of(name, self._folder.arrays)
        whole = place.whole(shape, self._network.moe.num_experts)
        view = self._folder.view(place.name, whole)
        self._unused.discard(place.name)
        of_kind = self._dtypes.setdefault(NUMBER.sub(".*", place.name), {})
        of_kind.setdefault(view.dtype.name, place.name)
        return place.part(view)

    def _mxfp4(self, name: str, shape: tuple[int, ...]) -> View:
        """Return a tensor [e, in, out] of blocks [e, out, in / 32, 16]."""
        e, into, out = shape
        groups, rest = divmod(into, quantized.GROUP)
        if rest:
            raise ValueError(
                f"{self._folder.path}: {quoted(name)} is quantised in groups of "
                f"{quantized.GROUP}, and config.json says that it has {into} inputs: "
                "they belong to different models"
            )
        blocks = self._view(f"{name}_blocks", (e, out, groups, quantized.GROUP // 2))
        scales = self._view(f"{name}_scales", (e, out, groups))
        decoded = quantized.mxfp4(blocks, scales)
        return views.transposed(decoded, (0, 2, 1))

    def notes(self, record: dict[str, Any]) -> tuple[str, ...]:
        """Return lines about tensors whose dtype differs from layer to layer, and about
        those that are read past. Raises ValueError for one that the model should not
        have."""
        return (*self._notes_on_dtypes(), *self._judge_rest(record))

    def _notes_on_dtypes(self) -> Iterator[str]:
        differing = [name_of for name_of in self._dtypes.values() if len(name_of) > 1]
        if differing and self._kind is None:  # layers of a quantised model may differ
            parts = (
                f"{quoted(name)} is {dtype}" for dtype, name in differing[0].items()
            )
            yield (
                f"tensors of some layers have another dtype ({', '.join(parts)}): all "
                "are read without rounding; tools/hf.py export writes one dtype, and "
                "with --dtype=float32 rounds none"
            )

    def _judge_rest(self, record: dict[str, Any]) -> Iterator[str]:
        found: dict[str, list[str]] = {}
        for name in sorted(self._unused):
            why = self._why_unused(name, record)
            if why is None:
                network = self._network
                size = f"{network.model.num_layers} layers"
                if ".experts." in name:
                    size += f" and {network.moe.num_experts} experts"
                raise ValueError(
                    f"{self._folder.path} has tensor {quoted(name)}, and config.json "
                    f"describes a {self._family.name} model of {size} without it: they "
                    "belong to different models"
                )
            found.setdefault(why, []).append(name)
        for why, names in found.items():
            if why:
                yield (
                    f"{len(names):,} tensors are read past, such as "
                    f"{quoted(names[0])}: {why}."
                )

    def _why_unused(self, name: str, record: dict[str, Any]) -> str | None:
        """Return why a tensor is not needed, "" for a reason that nobody needs to read;
        None: it should not be there."""
        family, network = self._family, self._network
        if family.text_prefix and name.startswith(family.other_parts):
            return "they see images, and the text part alone is imported"
        name = name.removeprefix(self._prefix)
        if BUFFERS.search(name):
            return ""
        if name == HEAD and network.model.tie_embeddings:
            return "tie_word_embeddings is true, so that the head is the embedding"
        if not family.has_extra_layers:
            return None
        why = "they are for multi-token prediction"
        if EXTRA_BLOCKS.search(name):
            return why
        at = re.match(r"model\.layers\.(\d{1,9})\.", name)
        extra = record.get("num_nextn_predict_layers")
        first = network.model.num_layers
        has_extra = isinstance(extra, int) and at is not None
        return why if has_extra and first <= int(at[1]) < first + extra else None
