"""Read config.json of a published model: each key with its type and range, and none
unread.

A key is *modelled* (a family reads it, and RULES says what its value may be),
*harmless* (HARMLESS: it does not change the function that the model computes), or
unknown. An unknown key is refused unless it is off: null, false, or empty. Every error
is one line with the key, its value and what is supported.
"""

from collections.abc import Callable
from typing import Any

from moejax.config.checks import MAX_LAYERS
from moejax.interop.strict_json import quoted

_NAMES = """
    architectures model_type auto_map transformers_version _name_or_path name_or_path
    tokenizer_class use_cache cache_implementation _attn_implementation
    attn_implementation _attn_implementation_autoset _experts_implementation
    experts_implementation torchscript return_dict output_attentions
    output_hidden_states output_router_logits torch_dtype dtype tp_plan
    base_model_tp_plan ep_size pretraining_tp id2label label2id num_labels problem_type
    task_specific_params chunk_size_feed_forward use_bfloat16
    keys_to_ignore_at_inference for_llm_compressor unsloth_fixed unsloth_version
"""
_TOKENS = """
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id unk_token_id
    mask_token_id im_start_token_id im_end_token_id decoder_start_token_id
    begin_suppress_tokens suppress_tokens forced_bos_token_id forced_eos_token_id
    bad_words_ids max_length min_length do_sample early_stopping num_beams
    num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size num_return_sequences exponential_decay_length_penalty
    remove_invalid_values return_dict_in_generate output_scores
"""
_LENGTHS = """
    max_position_embeddings max_sequence_length model_max_length max_model_len
    initial_context_length seq_length num_nextn_predict_layers num_mtp_layers
    mtp_loss_scaling_factor
"""
_TRAINING = """
    initializer_range init_std router_aux_loss_coef aux_loss_alpha seq_aux
    moe_aux_loss_coef router_z_loss_coef router_jitter_noise input_jitter_noise
    bias_update_speed use_flash_attention recompute fuse_rms_norm
"""
HARMLESS = frozenset((_NAMES + _TOKENS + _LENGTHS + _TRAINING).split())
"""Keys that do not change the function: names and versions; ids of tokens and how text
is generated; lengths that were trained, and layers that inference does not have;
training."""
REQUIRED = object()
"""Default of a key that config.json must have."""
MAX_WHOLE = 2**31 - 1
MAX_NUMBER = 1e12


def _whole(least: int, most: int = MAX_WHOLE) -> tuple[Callable[[Any], bool], str]:
    """Return the rule of whole numbers in a range."""
    return (
        lambda value: type(value) is int and least <= value <= most,
        f"must be a whole number from {least:,} to {most:,}",
    )


def _number(least: float, or_equal: bool) -> tuple[Callable[[Any], bool], str]:
    """Return the rule of numbers above a limit, or also equal to it."""
    return (
        lambda value: (
            type(value) in (int, float)
            and (least < value or (or_equal and value == least))
            and value <= MAX_NUMBER
        ),
        f"must be a number {'of at least' if or_equal else 'above'} {least:g} and at "
        f"most {MAX_NUMBER:g}",
    )


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "whole": _whole(1),
    "layers": _whole(1, MAX_LAYERS),
    "count": _whole(0),
    "last layer": _whole(-1),
    "number": _number(0, or_equal=False),
    "number from 0": _number(0, or_equal=True),
    "number from 1": _number(1, or_equal=True),
    "flag": (lambda value: type(value) is bool, "must be true or false"),
    "switch": (lambda value: type(value) in (bool, int), "must be true or false"),
    "object": (lambda value: isinstance(value, dict), "must be an object"),
}
"""What a value of each kind must be: a test, and the words of the message."""


class ConfigJson:
    """The keys of config.json, or of one object in it. It remembers which were read."""

    def __init__(self, record: dict[str, Any], label: str):
        """`label` begins the messages, such as "model/config.json: "."""
        self.record, self._label = record, label
        self._unread = set(record)

    def error(self, key: str, rule: str) -> ValueError:
        """Return the error that a key's value breaks a rule."""
        name = key if key.isidentifier() and key.isascii() else quoted(key)
        if key in self.record:
            name = f"{name}={_shown(self.record[key])}"
        return ValueError(f"{self._label}{name} {rule}")

    def __contains__(self, key: str) -> bool:
        """Return whether a key is there and not null."""
        return self.record.get(key) is not None

    def take(self, key: str, default: Any = None, null: Any = None) -> Any:
        """Return the value of a key, `default` if it is absent, or `null` if it is
        null; where that is REQUIRED, raise ValueError."""
        self._unread.discard(key)
        value = self.record.get(key, default)
        if key in self.record and value is None:
            value = null
        if value is REQUIRED:
            rule = "must be given" if key in self.record else "is missing"
            raise self.error(key, f"{rule}: a model of this family needs it")
        return value

    def get(
        self, key: str, rule: str, default: Any = REQUIRED, null: Any = REQUIRED
    ) -> Any:
        """Return what `take` says. Raises ValueError for a value that breaks a rule of
        RULES."""
        value = self.take(key, default, null)
        if key not in self:
            return value
        holds, text = RULES[rule]
        if not holds(value):
            raise self.error(key, text)
        return float(value) if rule.startswith("number") else value

    def choice(self, key: str, values: dict[str, Any], default: Any = REQUIRED) -> Any:
        """Return what `values` says of a key's text, or the default where the key is
        absent or null."""
        value = self.take(key, default, default)
        if key not in self:
            return value
        if not isinstance(value, str) or value not in values:
            named = ", ".join(repr(name) for name in values)
            raise self.error(key, f"is not supported: it must be one of {named}")
        return values[value]

    def choices(self, key: str, values: dict[Any, Any], length: int | None) -> Any:
        """Return what `values` says of each entry of a list, or None without one. The
        list has an entry for each of `length` layers, or any number of them."""
        found = self.take(key)
        if found is None:
            return None
        is_list = isinstance(found, list) and all(
            type(entry) in (int, str) and entry in values for entry in found
        )
        if not is_list:
            names = ", ".join(_shown(name) for name in list(values)[:4])
            more = f", .. {list(values)[-1]}" if len(values) > 4 else ""
            raise self.error(
                key, f"must be a list of {names}{more}; others do not exist"
            )
        if length is not None and len(found) != length:
            raise self.error(key, f"must have {length:,} entries, one for each layer")
        return tuple(values[entry] for entry in found)

    def only(self, key: str, *values: object) -> None:
        """Raise ValueError unless a key is absent or has one of these values. Null
        counts as false, and as 0."""
        found = self.take(key)
        is_off = found is None and not (values and values[0])
        if key not in self.record or is_off:
            return
        if not any(
            found == value and (type(found) is bool) == (type(value) is bool)
            for value in values
        ):
            named = " or ".join(_shown(value) for value in values) or "null"
            raise self.error(key, f"is not supported: it must be {named}")

    def object(self, key: str) -> "ConfigJson | None":
        """Return the object that is a key's value, or None."""
        value = self.get(key, "object", None, None)
        return None if value is None else ConfigJson(value, f"{self._label}{key}: ")

    def finish(self, harmless: frozenset[str] = HARMLESS) -> None:
        """Raise ValueError for a key that was not read, is not harmless, and is not
        off."""
        for key in sorted(self._unread - harmless):
            value = self.record[key]
            if value in (None, "", [], {}) or value is False:
                continue
            raise self.error(
                key,
                "is unknown, and could change what the model computes: moejax does "
                "not support it; if it changes nothing, remove it from config.json",
            )


def _shown(value: object) -> str:
    """Return a JSON value as one short line."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return quoted(value)
