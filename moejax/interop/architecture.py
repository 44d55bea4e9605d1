"""The model that a config.json describes."""

import dataclasses
from typing import Any

from moejax.interop import fields
from moejax.interop.config_json import HARMLESS, ConfigJson
from moejax.interop.families import DENSE, FAMILIES, Family
from moejax.interop.source import quantization
from moejax.interop.strict_json import quoted

CONFIG = "config.json"
HOLDING_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32"}
"""Dtype that holds the weights of a published one exactly."""
MULTIMODAL = "llama4"
"""The model_type of Llama-4 with a vision part; text_config describes the text part."""
IMAGE_KEYS = frozenset(
    [
        "vision_config", "text_config", "boi_token_index", "eoi_token_index",
        "image_token_index", "boi_token_id", "eoi_token_id", "image_token_id",
        "tie_word_embeddings", "quantization_config",
    ]
)  # fmt: skip
"""Keys beside text_config that the text part does not need."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The model that a config.json describes."""

    family: str
    """Name of the family, such as 'mixtral'."""
    fields: dict[str, dict[str, Any]]
    """Fields by part of `moejax.config.Config`: all that make up an architecture, also
    where a value is our default."""
    record: dict[str, Any]
    """config.json as it was read; of a model with a vision part, text_config."""
    notes: tuple[str, ...]
    """Lines to print: what is not imported as it is, and why that is right."""
    dtype: str
    """Dtype that holds the published weights: 'bfloat16' or 'float32'."""
    quantization: str | None
    """Format of quantised weights on disk: 'fp8' or 'mxfp4'; None where they are
    plain."""


def as_architecture(
    record: dict[str, Any], label: str, family: Family | None = None
) -> Architecture:
    """Return what a config.json says, to `family` or, if it is None, to that which it
    names.

    Raises ValueError, one line that begins with `label`, for a family, a key or a value
    that is not supported.
    """
    notes: tuple[str, ...] = ()
    if record.get("model_type") == MULTIMODAL:
        record = _text_part(record, label)
        notes += ("The vision part is not imported; the text part is.",)
    family = family or _find_family(record, label)
    config = ConfigJson(record, label)
    values: fields.Values = {}
    for setting in family.settings:
        setting.read(config, values)
    kind = quantization(config)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    usual = "bfloat16" if kind is not None else "float32"
    published = config.choice(key, {name: name for name in HOLDING_DTYPES}, usual)
    dropout = config.get("attention_dropout", "number from 0", 0.0, 0.0)
    config.finish()
    by_part = fields.nested(values)
    try:
        fields.make_network(by_part)
    except ValueError as error:
        raise ValueError(f"{label}{error}") from None
    if dropout:
        notes += (f"attention_dropout={dropout:g} is left out: there is no dropout.",)
    dtype = HOLDING_DTYPES[published]
    if dtype != published:
        notes += (f"Weights are {published}, which {dtype} holds exactly.",)
    if kind is not None:
        notes += (f"Weights are {kind} in blocks, and are decoded as they are read.",)
    return Architecture(family.name, by_part, record, notes, dtype, kind)


def _text_part(record: dict[str, Any], label: str) -> dict[str, Any]:
    """Return the config.json of the text part, with what is said beside it."""
    config = ConfigJson(record, label)
    text = config.object("text_config")
    if text is None:
        raise config.error("text_config", "is missing: it describes the text part")
    config.finish(HARMLESS | IMAGE_KEYS)
    names = ("torch_dtype", "dtype", "quantization_config")
    beside = {name: record[name] for name in names if record.get(name) is not None}
    if any(text.record.get(name) for name in ("torch_dtype", "dtype")):
        beside = {n: value for n, value in beside.items() if "dtype" not in n}
    return {**text.record, **beside, "model_type": "llama4_text"}


def _find_family(record: dict[str, Any], label: str) -> Family:
    """Return the family of model_type, or else of the class that config.json names."""
    found, classes = record.get("model_type"), record.get("architectures")
    for family in FAMILIES.values():
        if found in (family.name, *family.other_types):
            return family
    for family in FAMILIES.values():
        if isinstance(classes, list) and classes == [family.class_name]:
            return family
    known = ", ".join(
        name for f in FAMILIES.values() for name in (f.name, *f.other_types)
    )
    if isinstance(found, str) and found in DENSE:
        raise ValueError(
            f"{label}model_type={quoted(found)} is a dense model: make experts of it "
            "by tools/hf.py upcycle"
        )
    raise ValueError(
        f"{label}model_type={quoted(found)} is not supported: it must be one of "
        f"{known}, {MULTIMODAL}"
    )
