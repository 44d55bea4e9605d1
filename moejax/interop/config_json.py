"""Read config.json of a published model: each key with its type and range, and none
unread.

A key is *modelled* (a family reads it), *harmless* (HARMLESS: it does not change the
function that the model computes), or unknown. An unknown key is refused unless it is
off: null, false, or empty. Every error is one line with the key, its value and what is
supported.
"""

import math
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

    def whole(
        self,
        key: str,
        default: Any = REQUIRED,
        null: Any = REQUIRED,
        least: int = 1,
        most: int = MAX_WHOLE,
    ) -> Any:
        """Return a whole number, or what `take` says."""
        value = self.take(key, default, null)
        if key in self and not (_is_whole(value) and least <= value <= most):
            raise self.error(key, f"must be a whole number from {least:,} to {most:,}")
        return value

    def number(
        self,
        key: str,
        default: Any = REQUIRED,
        null: Any = REQUIRED,
        least: float = 0,
        above: bool = True,
    ) -> Any:
        """Return a number above `least`, or also `least` itself unless `above`; or what
        `take` says."""
        value = self.take(key, default, null)
        if key not in self:
            return value
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        if not (
            is_number
            and (value > least if above else value >= least)
            and value <= MAX_NUMBER
            and math.isfinite(value)
        ):
            rule = "above" if above else "of at least"
            raise self.error(
                key, f"must be a number {rule} {least:g} and at most {MAX_NUMBER:g}"
            )
        return float(value)

    def flag(self, key: str, default: Any = REQUIRED) -> Any:
        """Return true or false, or the default where the key is absent."""
        value = self.take(key, default, REQUIRED)
        if key in self and not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def whole_or_flag(self, key: str, default: Any = REQUIRED) -> Any:
        """Return a whole number from 0 on, or true or false."""
        if isinstance(self.record.get(key), bool):
            return self.flag(key)
        return self.whole(key, default, least=0)

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

    def wholes(self, key: str, most: int = MAX_LAYERS) -> Any:
        """Return a list of whole numbers from 0 to `most`, or None."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(
            _is_whole(number) and 0 <= number <= most for number in value
        ):
            raise self.error(key, f"must be a list of whole numbers from 0 to {most:,}")
        return value

    def names(self, key: str, values: dict[str, Any], length: int) -> Any:
        """Return what `values` says of each text of a list, or None."""
        value = self.take(key)
        if value is None:
            return None
        named = ", ".join(repr(name) for name in values)
        if not isinstance(value, list) or not all(
            isinstance(name, str) and name in values for name in value
        ):
            raise self.error(key, f"must be a list of {named}; others do not exist")
        if len(value) != length:
            raise self.error(key, f"must have {length:,} names, one for each layer")
        return tuple(values[name] for name in value)

    def only(self, key: str, *values: object) -> None:
        """Raise ValueError unless a key is absent or has one of these values. Null
        counts as false, and as 0."""
        found = self.take(key)
        is_off = found is None and not (values and values[0])
        if key not in self.record or is_off:
            return
        if not any(_is_same(found, value) for value in values):
            named = " or ".join(_shown(value) for value in values) or "null"
            raise self.error(key, f"is not supported: it must be {named}")

    def object(self, key: str) -> "ConfigJson | None":
        """Return the object that is a key's value, or None."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "must be an object")
        return ConfigJson(value, f"{self._label}{key}: ")

    def finish(self, harmless: frozenset[str] = HARMLESS) -> None:
        """Raise ValueError for a key that was not read, is not harmless, and is not
        off."""
        for key in sorted(self._unread - harmless):
            value = self.record[key]
            if value is None or value is False or (not value and _is_empty(value)):
                continue
            raise self.error(
                key,
                "is unknown, and could change what the model computes: moejax does "
                "not support it; if it changes nothing, remove it from config.json",
            )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_empty(value: object) -> bool:
    return isinstance(value, str | list | dict)


def _is_same(found: object, value: object) -> bool:
    """Return whether a JSON value is a given one; 0.0 is 0, and false is not."""
    if isinstance(found, bool) or isinstance(value, bool):
        return found is value
    return found == value


def _shown(value: object) -> str:
    """Return a JSON value as one short line."""
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    try:
        return quoted(value)
    except RecursionError:
        return "a deeply nested value"
