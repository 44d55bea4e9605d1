"""Test that a message about a configuration is one readable line, whatever is in it."""

import contextlib
import io

import pytest

from train.config import gin_reader
from train.config.gin_reader import ConfigError
from train.launch.program import guarded, say_loudly
from train.messages import MAX_LINE, one_line

LONG = 100_000


def refusal(tmp_path, text: str) -> str:
    """Return the message about a file with this text."""
    file = tmp_path / "a.gin"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        gin_reader.load([file])
    return str(error.value)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("Train.num_steps = '{long}'", "must be an int"),
        ("Train.{long} = 3", "Train has no field"),
        ("{long}.num_steps = 3", "there is no class"),
        ("Train.num_steps = %{long}", "has no value"),
        ("import {long}", "runs no code"),
        ("{long}/Train.num_steps = 3", "nothing reads the scope"),
        ("Train.num_steps = ({long}", "syntax error"),
        ("Data.corpus = ('{long}',)\nData.weights = (1, 2)", "must have one weight"),
        ("Train.num_steps = 0x" + "f" * 5000, "64 bits"),
        ("Train.num_steps = -9223372036854775809", "64 bits"),
    ],
)
def test_a_long_name_or_value_is_cut(tmp_path, text, what):
    message = refusal(tmp_path, text.format(long="x" * LONG))
    assert len(message) <= 500
    assert message.startswith(f"{tmp_path}/a.gin:")
    assert what in message


def test_macros_that_multiply_are_refused(tmp_path):
    lines = [f"A{i} = (%A{i + 1}, %A{i + 1})" for i in range(40)]
    text = "\n".join([*lines, "A40 = 'x'", "Data.corpus = %A0"])
    assert "more than 20000 items" in refusal(tmp_path, text)
    lines = [f"B{i} = %B{i + 1}" for i in range(5000)]
    text = "\n".join([*lines, "B5000 = 'x'", "Data.corpus = %B0"])
    assert "30 macros that use one another" in refusal(tmp_path, text)


def test_includes_that_multiply_are_refused(tmp_path):
    for i in range(40):
        (tmp_path / f"f{i}.gin").write_text(f"include 'f{i + 1}.gin'\n" * 2)
    (tmp_path / "f40.gin").write_text("Train.num_steps = 3\n")
    assert "files are included" in refusal(tmp_path, "include 'f0.gin'\n")


@pytest.mark.parametrize("path", ["/dev/zero", "a\0b.gin"])
def test_files_that_are_none(path):
    with pytest.raises(ConfigError, match=r"give (the path of )?a \.gin file"):
        gin_reader.load([path])


@pytest.mark.parametrize(
    ("character", "shown"),
    [
        ("\x1b[31m", "\\x1b[31m"),
        ("\u202e", "\\u202e"),
        ("\u2066", "\\u2066"),
        ("\0", "\\x00"),
        ("\x9b", "\\x9b"),
        ("\udcff", "\\udcff"),
        ("\U000e0041", "\\U000e0041"),
        ("é ß 語 ∑", "é ß 語 ∑"),
    ],
)
def test_a_line_shows_control_characters_escaped(capsys, character, shown):
    assert one_line(ValueError(f"no file a{character}b")) == f"no file a{shown}b"
    with contextlib.redirect_stderr(io.StringIO()) as err:
        say_loudly(f"a{character}b")
    assert err.getvalue() == f"a{shown}b\n"


def test_a_line_is_cut_in_the_middle(capsys):
    with guarded(as_json=False) as ending:
        raise ValueError("a.gin:3: \n" + "x " * LONG + ": give another one")
    assert ending.code == 2
    line = capsys.readouterr().err
    assert len(line) <= MAX_LINE + len("error: \n")
    assert line.startswith("error: a.gin:3: x x")
    assert line.endswith("x : give another one\n")
