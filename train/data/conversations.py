"""Conversations as tokens, with marks on those that a model is to predict.

    record     {"messages": [{"role": .., "content": ..}, ..]}, or prompt and completion
    text       what the chat template of a published folder makes of it
    targets    the assistant's parts of the text, with the token that ends a turn

A template says itself which parts are the assistant's, by {% generation %}, or they are
found by rendering beginnings of the conversation: without the answer, and with it. Each
must be the beginning of the whole text; a template that changes earlier turns later on,
as one does that drops what was thought, is refused.
"""

import bisect
import dataclasses
import datetime
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moejax.interop.strict_json import read_json
from train.data.documents import read_records, record_error
from train.data.shards import MARK
from train.data.tokenizer import Tokenizer
from train.messages import one_line

BATCH_CONVERSATIONS = 4096
"""Number of conversations that are packed into windows at a time."""
TOKEN = re.compile(r"<[|\uff5c][^\s<>{}'\"|\uff5c]+[|\uff5c]>")
"""What looks like the name of a special token: <|end|>, also with wide bars."""
_BEGIN, _END = "\0generation\0", "\0endgeneration\0"
"""Stand around the assistant's parts until the text is whole."""


class _Generation(Extension):
    """The block {% generation %} of transformers' chat templates."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        call = self.call_method("_mark")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _mark(self, caller) -> str:
        return f"{_BEGIN}{caller()}{_END}"


@dataclasses.dataclass(frozen=True)
class Template:
    """A chat template with the names of tokens that it may use."""

    source: str
    names: dict[str, str]
    """'bos_token' and others, from tokenizer_config.json."""

    def render(self, record: dict[str, Any], *, asks: bool = False) -> str:
        """Return the text of a conversation; with `asks` the beginning of an answer
        follows it. Raises ValueError where the template refuses the conversation."""
        try:
            return _compiled(self.source).render(
                messages=record["messages"],
                tools=record.get("tools"),
                documents=None,
                add_generation_prompt=asks,
                **self.names,
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            reason = one_line(error, 200)
            raise ValueError(f"the chat template fails: {reason}") from error


def load_template(folder: Path) -> Template:
    """Return the chat template of a published folder: chat_template.jinja, else that in
    tokenizer_config.json. Raises ValueError, one line, where there is none."""
    path = folder / "tokenizer_config.json"
    config = read_json(path, "the tokenizer's settings") if path.exists() else {}
    names = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        names[name] = token.get("content") if isinstance(token, dict) else token or ""
    file = folder / "chat_template.jinja"
    source = file.read_text() if file.exists() else config.get("chat_template")
    if not isinstance(source, str):
        raise ValueError(
            f"'{folder}' has no chat template, in chat_template.jinja or as "
            "chat_template of tokenizer_config.json: name a folder that has one"
        )
    try:
        _compiled(source)
    except jinja2.TemplateError as error:
        raise ValueError(
            f"the chat template of '{folder}' is no template: {one_line(error, 160)}"
        ) from error
    return Template(source, names)


def check_tokens(template: Template, tokenizer: Tokenizer) -> None:
    """Raise ValueError where a tokenizer lacks a token that the template writes: the
    names in tokenizer_config.json, and what looks like <|a token|> in its text. It
    would become several tokens of text, which end no turn."""
    if tokenizer.encoder is None:
        return
    used = [name for name in template.names.values() if name]
    used += TOKEN.findall(template.source)
    lacks = [x for x in dict.fromkeys(used) if tokenizer.encoder.token_to_id(x) is None]
    if lacks:
        raise ValueError(
            f"the chat template writes {', '.join(map(repr, lacks[:4]))}, and the "
            f"tokenizer '{tokenizer.name}' has no such token: use the tokenizer of the "
            "template's folder"
        )


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(
        form
    )
    return environment.from_string(source)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str):
    raise jinja2.TemplateError(message)


def as_conversation(record: Any) -> dict[str, Any]:
    """Return a record with `messages`, made of prompt and completion where it has
    these: texts, or lists of messages. Raises ValueError, without a place, for others.
    """
    if not isinstance(record, dict):
        raise ValueError(f"the record is a {type(record).__name__}, not an object")
    has_pair = "prompt" in record or "completion" in record
    if ("messages" in record) == has_pair:
        raise ValueError("a conversation has messages, or prompt and completion")
    if has_pair:
        parts = record.get("prompt"), record.get("completion")
        prompt, completion = (
            [{"role": role, "content": part}] if isinstance(part, str) else part
            for role, part in zip(("user", "assistant"), parts)
        )
        if not isinstance(prompt, list) or not isinstance(completion, list):
            raise ValueError("prompt and completion are texts, or lists of messages")
        messages = [*prompt, *completion]
    else:
        messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages are no list of turns")
    for number, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise ValueError(f"turn {number} has no role")
        if not (message.get("content") or message.get("tool_calls")):
            raise ValueError(f"turn {number}, of {role!r}, is empty")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no turn is the assistant's, so that nothing is a target")
    return {"messages": messages, "tools": record.get("tools")}


def targets(
    template: Template, record: dict[str, Any]
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and the spans of characters that are the
    assistant's. Raises ValueError where they cannot be found."""
    text = template.render(record)
    if _BEGIN in text:
        return _split_marks(text)
    messages, spans = record["messages"], []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = template.render(record | {"messages": messages[:number]}, asks=True)
        after = template.render(record | {"messages": messages[: number + 1]})
        if not (text.startswith(before) and text.startswith(after)):
            raise ValueError(
                f"the chat template writes turn {number} in another way when others "
                "follow it, or when it is asked for: its targets cannot be found; use "
                "a template with {% generation %} around the assistant's turns"
            )
        spans.append((len(before), len(after)))
    return text, spans


def _split_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    text, spans = "", []
    for number, part in enumerate(marked.split(_BEGIN)):
        own, end, rest = part.partition(_END)
        if number and end:
            spans.append((len(text), len(text) + len(own)))
        text += own + rest
    return text, spans


def encode(
    tokenizer: Tokenizer, text: str, spans: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of a text, int32 [b], and whether each is a target: a token that
    has characters of a span. Names of special tokens stand for these tokens."""
    if tokenizer.encoder is None:
        data = text.encode()
        id_b = np.frombuffer(data, np.uint8).astype(np.int32)
        edges = np.cumsum([0, *(len(char.encode()) for char in text)])
        offset_b2 = np.repeat(np.arange(len(text)), np.diff(edges))[:, None] + [0, 1]
    else:
        tokenizer.encoder.encode_special_tokens = False
        try:
            found = tokenizer.encoder.encode(text, add_special_tokens=False)
        finally:
            tokenizer.encoder.encode_special_tokens = True
        id_b, offset_b2 = np.array(found.ids, np.int32), np.array(found.offsets)
    offset_b2 = offset_b2.reshape(-1, 2)
    is_target_b = np.zeros(len(id_b), bool)
    for first, last in spans:
        is_target_b |= (offset_b2[:, 0] < last) & (offset_b2[:, 1] > first)
    return id_b, is_target_b


def check_special(tokenizer: Tokenizer, record: dict[str, Any]) -> None:
    """Raise ValueError where the text of a turn holds the name of a special token,
    which would stand for that token: it could end the turn of another speaker. So could
    the character 0, which ends texts of bytes."""
    names = []
    if tokenizer.encoder is not None:
        added = tokenizer.encoder.get_added_tokens_decoder().values()
        names = [token.content for token in added if token.special]
    for number, message in enumerate(record["messages"]):
        content = json.dumps(message, ensure_ascii=False, default=str)
        if "\\u0000" in content:
            raise ValueError(f"turn {number} holds the character 0: remove it")
        if found := next((name for name in names if name in content), None):
            raise ValueError(
                f"turn {number} holds {found!r}, which is a special token: remove it"
            )


def pack(lengths: Sequence[int], window: int) -> Iterator[list[int]]:
    """Yield the numbers of the conversations of each window, best fit first: each goes,
    the longest first, to the fullest window that has room for it."""
    windows: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # of each window, and its number: sorted
    for number in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[number]
        place = bisect.bisect_left(rooms, (length, 0))
        if place == len(rooms):
            windows.append([])
            room, index = window, len(windows) - 1
        else:
            room, index = rooms.pop(place)
        windows[index].append(number)
        bisect.insort(rooms, (room - length, index))
    yield from windows


@dataclasses.dataclass(frozen=True)
class Chat:
    """How conversations become windows of tokens."""

    template: Template
    window: int
    """Number of tokens of a window, which holds whole conversations: Data.seq_len."""
    long: Literal["cut", "skip"] = "cut"
    """What becomes of a conversation of more tokens than a window: its end is cut off,
    or it is left out. Both are counted."""


class PackedWindows(NamedTuple):
    """Windows of whole conversations, whose targets are marked."""

    token_b: np.ndarray
    start_d: np.ndarray
    """Indices of the tokens that begin a conversation, or the rest of a window."""
    num_bytes: int
    counts: Counter
    """Numbers of conversations, of tokens and targets in them, of conversations that
    were cut, and of those that were left out."""


def read_windows(
    path: Path, chat: Chat, tokenizer: Tokenizer
) -> Iterator[PackedWindows]:
    """Yield the conversations of a file in windows, some thousands at a time.

    The rest of a window is filled with the separator. Raises a ValueError of one line,
    with its place, for a record that is no conversation or cannot be rendered.
    """
    found, counts, place, num_bytes = [], Counter(), "", 0
    for place, record, num_bytes in read_records(path):
        try:
            conversation = as_conversation(record)
            check_special(tokenizer, conversation)
            id_b, is_target_b = encode(tokenizer, *targets(chat.template, conversation))
        except ValueError as error:
            raise record_error(place, str(error)) from error
        if len(id_b) > chat.window:
            id_b, is_target_b = id_b[: chat.window], is_target_b[: chat.window]
            is_left_out = chat.long == "skip" or not is_target_b[1:].any()
            counts["num_skipped" if is_left_out else "num_cut"] += 1
            if is_left_out:
                continue
        found.append(id_b + MARK * is_target_b)
        counts["num_conversations"] += 1
        counts["num_targets"] += int(is_target_b[1:].sum())
        if len(found) == BATCH_CONVERSATIONS:
            yield _windows(found, chat.window, tokenizer.separator, num_bytes, counts)
            found, counts = [], Counter()
    if found or counts:
        yield _windows(found, chat.window, tokenizer.separator, num_bytes, counts)


def _windows(
    found: list[np.ndarray], window: int, filler: int, num_bytes: int, counts: Counter
) -> PackedWindows:
    tokens, lengths = [], []
    for numbers in pack([len(id_b) for id_b in found], window):
        parts = [found[number] for number in numbers]
        room = window - sum(map(len, parts))
        parts += [np.full(room, filler, np.int32)] if room else []
        tokens += parts
        lengths += map(len, parts)
    token_b = np.concatenate([np.zeros(0, np.int32), *tokens])
    start_d = np.cumsum(lengths, dtype=np.int64) - np.array(lengths, np.int64)
    return PackedWindows(token_b, start_d, num_bytes, counts)


def shown(tokenizer: Tokenizer, id_b: np.ndarray, *, in_colour: bool) -> str:
    """Return the text of marked tokens, with the targets in colour or in brackets."""
    begin, end = ("\x1b[32m", "\x1b[0m") if in_colour else ("[[", "]]")
    is_target_b = id_b >= MARK
    edges = [0, *(np.flatnonzero(np.diff(is_target_b)) + 1).tolist(), len(id_b)]
    text = ""
    for first, last in itertools.pairwise(edges):
        part = tokenizer.decode((id_b[first:last] & (MARK - 1)).tolist())
        text += f"{begin}{part}{end}" if is_target_b[first] else part
    return text
