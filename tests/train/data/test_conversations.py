"""Conversations become windows of tokens, of which the assistant's are targets."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from moejax.config import Data
from tools import prepare
from train.data import HeldOut, TrainBatches, load_corpus
from train.data.conversations import (
    Template,
    as_conversation,
    encode,
    load_template,
    pack,
    targets,
)
from train.data.tokenizer import load_tokenizer

BASE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}" + ASK
)
FORGETS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}!{% endif %}<|end|>{% endfor %}" + ASK
)
"""Writes the last answer in another way than it does when others follow."""
SPECIAL = ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<s>")
HELLO = {
    "messages": [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Ünd?"},
        {"role": "assistant", "content": "Ja."},
    ]
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a tokenizer of bytes and special tokens, and a chat template."""
    names = pre_tokenizers.ByteLevel.alphabet()
    model = models.BPE(
        vocab={name: i for i, name in enumerate(sorted(names))}, merges=[]
    )
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens(list(SPECIAL))
    path = tmp_path / "model"
    path.mkdir()
    encoder.save(str(path / "tokenizer.json"))
    ids = {"bos_token_id": encoder.token_to_id("<s>")}
    (path / "config.json").write_text(json.dumps(ids))
    config = {"bos_token": "<s>", "eos_token": {"content": "<|end|>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(MARKED)
    return path


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def spans_of(source: str, record=HELLO) -> list[str]:
    text, spans = targets(Template(source, {"bos_token": "<s>"}), record)
    return [text[first:last] for first, last in spans]


@pytest.mark.parametrize("source", [MARKED, BASE + ASK])
def test_targets_are_the_answers_with_their_end(source):
    """With marks, and by rendering beginnings of the conversation."""
    assert spans_of(source) == ["Hi.<|end|>", "Ja.<|end|>"]


def test_a_template_that_changes_earlier_turns_is_refused():
    with pytest.raises(ValueError, match=r"writes turn 1 in another way.*generation"):
        spans_of(FORGETS)
    one = as_conversation({"prompt": "Hello?", "completion": "Hi."})
    assert spans_of(FORGETS, one) == ["Hi.!<|end|>"]


def test_pairs_are_conversations_too():
    by_text = as_conversation({"prompt": "Hello?", "completion": "Hi."})
    by_turns = as_conversation(
        {"prompt": HELLO["messages"][:1], "completion": HELLO["messages"][1:2]}
    )
    assert by_text == by_turns == {"messages": HELLO["messages"][:2], "tools": None}


def test_a_token_is_a_target_if_it_has_a_character_of_a_target(folder):
    """Ids are those of the whole text, in which names of special tokens are these."""
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"), "<s>")
    text, spans = targets(load_template(folder), HELLO)
    id_b, is_target_b = encode(tokenizer, text, spans)
    np.testing.assert_array_equal(id_b, tokenizer.encode_special(text))
    assert tokenizer.decode(id_b[is_target_b].tolist()) == "Hi.<|end|>Ja.<|end|>"
    ids = tokenizer.encoder.get_vocab()
    assert id_b[0] == ids["<s>"]
    assert np.count_nonzero(id_b == ids["<|end|>"]) == 4
    of_bytes = load_tokenizer("bytes")
    id_b, is_target_b = encode(of_bytes, "aü|bö|c", [(1, 3), (4, 5)])
    assert of_bytes.decode(id_b[is_target_b].tolist()) == "ü|ö"


@pytest.mark.parametrize("seed", range(4))
def test_windows_hold_whole_conversations_and_little_else(seed):
    lengths = np.random.default_rng(seed).integers(1, 101, 200).tolist()
    windows = list(pack(lengths, 100))
    assert sorted(i for window in windows for i in window) == list(range(200))
    assert max(sum(lengths[i] for i in window) for window in windows) <= 100
    assert len(windows) <= 1.1 * sum(lengths) / 100 + 1


def prepared(folder, records, tmp_path, *words) -> tuple[int, dict]:
    """Prepare conversations in windows of 48; return the exit code and manifest."""
    out = tmp_path / "out"
    path = write(tmp_path / "chat.jsonl", records)
    names = ["--chat", str(folder), "--window=48"]
    code = prepare.main([str(path), "--out", str(out), *names, *words])
    return code, json.loads((out / "manifest.json").read_text()) if code == 0 else {}


def conversation(number: int, length: int) -> dict:
    answer = chr(ord("a") + number % 26) * length
    return as_conversation({"prompt": f"{number}?", "completion": answer})


def test_a_run_reads_whole_conversations_and_their_targets(folder, tmp_path, capsys):
    """Every window of an epoch occurs once; positions begin anew with each
    conversation; padding is no target; the token behind a window is none."""
    records = [conversation(i, 3 + i % 7) for i in range(60)]
    code, manifest = prepared(folder, records, tmp_path, "--show=1")
    assert code == 0
    assert "[[" in capsys.readouterr().out
    assert manifest["conversations"]["num_conversations"] == 60
    num_targets = sum(3 + i % 7 + 1 for i in range(60))
    assert manifest["conversations"]["num_targets"] == num_targets
    cfg = Data(
        corpus=str(tmp_path / "out"), tokenizer=str(folder / "tokenizer.json"),
        separator="<s>", seq_len=48, documents="separate", held_out_every=5,
    )  # fmt: skip
    corpus = load_corpus(cfg, 300)
    batches = TrainBatches(corpus, cfg, 2)
    (number,) = batches.num_windows
    num_held_out = manifest["num_tokens"] // 48 - number
    held_out = HeldOut(corpus, cfg, 1, num_held_out)
    rows = [batches.rows(n // 2, n % 2, n % 2 + 1) for n in range(number)]
    rows += [held_out.rows(n, 0, 1) for n in range(num_held_out)]
    seen, tokenizer = [], corpus.tokenizer
    for windows in rows:
        (id_t,), (position_t,) = windows.token_bt, windows.position_bt
        (is_target_t,) = windows.is_target_bt
        assert not is_target_t[-1]
        starts = np.flatnonzero(position_t[:-1] == 0)
        for first, last in zip(starts, [*starts[1:], 48]):
            id_b, is_target_b = id_t[first:last], is_target_t[first:last]
            text = tokenizer.decode(id_b.tolist())
            if is_target_b.any():
                answer = tokenizer.decode(id_b[is_target_b].tolist())
                assert text.startswith("<s><|user|>")
                assert text.endswith(f"<|assistant|>{answer}")
                seen.append(text)
            else:
                assert set(text.split("<s>")) == {""}
    assert len(set(seen)) == len(seen) == 60
    assert sum(windows.is_target_bt.sum() for windows in rows) == num_targets


@pytest.mark.parametrize(("long", "kept"), [("cut", 2), ("skip", 1)])
def test_long_conversations_are_cut_or_left_out_and_counted(
    folder, tmp_path, long, kept
):
    """One whose cut beginning has no target is left out in either case."""
    asks = as_conversation({"prompt": "?" * 60, "completion": "Yes"})
    records = [conversation(0, 5), conversation(1, 90), asks]
    _, manifest = prepared(folder, records, tmp_path, f"--long={long}")
    counts = manifest["conversations"]
    assert counts["num_conversations"] == kept
    assert (counts["num_cut"], counts["num_skipped"]) == (kept - 1, 3 - kept)


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"messages": HELLO["messages"][:1]}, "no turn is the assistant's"),
        (
            {"messages": [{"role": "user", "content": ""}]},
            "turn 0, of 'user', is empty",
        ),
        ({"messages": HELLO["messages"], "prompt": "a"}, "messages, or prompt and"),
        ({"text": "a"}, "messages, or prompt and completion"),
        ({"prompt": "a"}, "are texts, or lists of messages"),
        ({"messages": [{"content": "a"}]}, "turn 0 has no role"),
        (
            {"prompt": "a<|end|>b", "completion": "c"},
            r"turn 0 holds '<|end|>', which is a special token",
        ),
        ({"prompt": "a\0b", "completion": "c"}, "turn 0 holds the character 0"),
        ({"prompt": "fail", "completion": "c"}, "the chat template fails: no, never"),
    ],
)
def test_bad_records_are_one_line_and_leave_nothing(
    folder, tmp_path, capfd, record, line
):
    fails = "{% if messages[0].content == 'fail' %}{{ raise_exception('no, never') }}"
    (folder / "chat_template.jinja").write_text(fails + "{% endif %}" + MARKED)
    code, _ = prepared(folder, [conversation(0, 5), record], tmp_path)
    err = capfd.readouterr().err
    assert code == 2
    assert line in err
    assert "chat.jsonl:2" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["template", "settings"])
def test_a_tokenizer_without_the_tokens_of_the_template_is_refused(
    folder, tmp_path, capfd, place
):
    if place == "template":
        (folder / "chat_template.jinja").write_text(MARKED + "<|other|>")
    else:
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|other|>"}')
    assert prepared(folder, [conversation(0, 5)], tmp_path)[0] == 2
    err = capfd.readouterr().err
    assert "writes '<|other|>', and the tokenizer" in err
    assert err.count("\n") == 1


def test_a_turn_of_a_megabyte_is_cut(folder, tmp_path):
    records = [conversation(0, 5), conversation(1, 2**20)]
    code, manifest = prepared(folder, records, tmp_path)
    assert code == 0
    assert manifest["num_tokens"] == 96


def test_parquet_holds_conversations_too(folder, tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    records = [HELLO, {"messages": [*HELLO["messages"][:2]]}]
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "chat.parquet")
    words = ["--chat", str(folder), "--window=96"]
    out = tmp_path / "out"
    assert (
        prepare.main([str(tmp_path / "chat.parquet"), "--out", str(out), *words]) == 0
    )
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["conversations"]["num_targets"] == 12


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"seq_len": 32}, r"set Data.seq_len = 48 \(it is 32\)"),
        ({"documents": "joined"}, "Data.documents = 'separate'"),
        ({"corpus": ("{out}", "{text}")}, "name one kind alone"),
    ],
)
def test_a_run_of_other_windows_is_refused(folder, tmp_path, change, line):
    prepared(folder, [conversation(i, 9) for i in range(20)], tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("words " * 100)
    fields = {
        "corpus": str(tmp_path / "out"), "tokenizer": str(folder / "tokenizer.json"),
        "separator": "<s>", "seq_len": 48, "documents": "separate",
        "held_out_every": 2,
    }  # fmt: skip
    change = change | {
        "corpus": tuple(
            name.format(out=fields["corpus"], text=text)
            for name in change.get("corpus", ("{out}",))
        )
    }
    with pytest.raises(ValueError, match=line):
        load_corpus(Data(**(fields | change)), 300)
