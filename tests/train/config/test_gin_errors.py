"""Test that the wrapper around gin refuses wrong files with one line that has the place
of the error and, where there is one, a valid name."""

import pathlib
import re
from typing import Literal

import pytest

from train.config.gin_reader import ConfigError, load
from train.config.names import convert

# Text of a file, the number of the wrong line, and a part of the message.
WRONG = [
    ("Trian.num_steps = 5", 1, "no class Trian; nearest is Train"),
    ("Config.mesh = 5", 1, "no class Config; valid are Attention, Balance"),
    ("moejax.config.Trainer.seed = 5", 1, "nearest is Train"),
    ("Train.num_step = 5", 1, "no field num_step; nearest is Train.num_steps"),
    ("\n\nMoe.topk = 5", 3, "Moe has no field topk; nearest is Moe.top_k"),
    ("Train.top_k = 5", 1, "nearest is Moe.top_k"),
    ("Train.zzz = 5", 1, "valid are Train.num_steps, Train.batch_size"),
    ("Train:\n  seed = 1\n  num_step = 5", 3, "nearest is Train.num_steps"),
    ("Train.num_steps = 'abc'", 1, "'abc' must be an int, and is of type str"),
    ("Train.num_steps = 1e3", 1, "1000.0 must be an int, and is of type float"),
    ("Train.num_steps = True", 1, "must be an int, and is of type bool"),
    ("Train.peak_tflops = 'a'", 1, "must be a finite float or None"),
    (
        "Model.attention = 'cudn'",
        1,
        "one of 'auto', 'reference', 'blocked', 'cudnn', and is of type str",
    ),
    ("Model.attention = 'cudn'", 1, "nearest is 'cudnn'"),
    ("Optimizer.learning_rate = 1e999", 1, "must be a finite float"),
    (
        "Data.corpus = {'a': @os.system}",
        1,
        "must be a str or a tuple of (a str, ...), and is",
    ),
    ("STEPS = 5", 1, "macro STEPS is never used; use it as %STEPS"),
    ("EXPERTS=8\nMoe.num_experts=%EXPERTS\nEXPERT=4", 3, "nearest is %EXPERTS"),
    ("Train.seed = %NONE", 1, "%NONE has no value; define it with NONE = ..."),
    ("A = %B\nB = %A\nTrain.seed = %A", 2, "macros in a circle: A -> B -> A"),
    ("A = 'x'\nTrain.seed = %A", 2, "Train.seed = 'x' (from %A) must be an int"),
    ("a/Train.num_steps = 5", 1, "nothing reads the scope 'a'; write Train.num_steps"),
    ("Train.run_dir = @print()", 1, "@print is refused"),
    ("A = @print\nTrain.run_dir = %A", 1, "@print is refused"),
    ("import os", 1, "'import os' is refused"),
    (
        "# x\nfrom __gin__ import dynamic_registration",
        2,
        "dynamic_registration' is refused",
    ),
    ("Train.seed = 1\nTrain.seed = 1", 2, "Train.seed is bound twice, first at"),
    ("A = 1\nA = 2\nTrain.seed = %A", 2, "A is bound twice, first at"),
    ("Train.seed = 1\nTrain.num_steps = 1e", 2, "syntax error"),
    ("Train.seed = 10**6", 1, "syntax error: Expected newline"),
    ("Train.run_dir = runs/a", 1, "Failed to parse token 'runs'; write Class.field"),
    ("Train.seed = (1,\n", 1, "EOF in multi-line"),
    ("Train.seed", 1, "expected ':' or '='"),
    ("Train:\nseed = 1", 2, "Expected indentation"),
    ("Train.seed = 1\n\x00", 2, "a null byte"),
    ("include 'nope.gin'", 1, "include 'nope.gin': there is no file"),
    ("include 'bad.gin'", 1, "includes in a circle"),
    ("include 3", 1, "Expected file path as string"),
    # Rules of the dataclasses; the message names the line that bound the field.
    ("Train.seed = 1\nTrain.num_steps = 0", 2, "num_steps=0 must be at least 1"),
    (
        "Mesh.tensor = 2\nDispatch.expert_shards = 3",
        2,
        "must divide the tensor axis (2)",
    ),
    (
        "\nMoe.num_experts = 60\nMesh.expert = 8",
        3,
        "use 56 or 64, or another Mesh.expert",
    ),
    ("\nMesh.expert = 3", 2, "must be divisible by the expert axis (3)"),
    ("Router.kind = 'recorded'\nRouter.bias_rate = 0.1", 2, "choose by scores"),
]


@pytest.mark.parametrize(("text", "line", "fragment"), WRONG)
def test_wrong_file_is_one_line_with_its_place(
    tmp_path: pathlib.Path, text: str, line: int, fragment: str
) -> None:
    path = tmp_path / "bad.gin"
    path.write_text(text)
    message = refusal([path])
    assert message.startswith(f"{path}:{line}: ")
    assert fragment in message


@pytest.mark.parametrize(
    ("params", "blamed", "fragment"),
    [
        (["Train.num_step = 3"], "Train.num_step = 3", "nearest is Train.num_steps"),
        (["Train.seed = 'a'"], "Train.seed = 'a'", "must be an int"),
        (["Data.seed = 1", "seed = 3"], "seed = 3", "nearest is Train.seed"),
        (["import os"], "import os", "refused"),
        (["include 'nope.gin'"], "include 'nope.gin'", "there is no file"),
        (["Mesh.expert = 3", "Mesh.data = 2"], "Mesh.expert = 3", "divisible"),
        (["Train.run_dir = '\udcff'"], "Train.run_dir = '\udcff'", "syntax error"),
        (["Train.seed = 1\nTrain.seed = 2"], "Train.seed = 1\nTrain.seed = 2", "twice"),
    ],
)
def test_wrong_param_is_one_line_with_the_param(
    params: list[str], blamed: str, fragment: str
) -> None:
    message = refusal([], params)
    assert message.startswith(f"--gin_param {blamed!r}: ")
    assert fragment in message


DOMAIN = "Dispatch.domain = (2, 1)"
GROUP = "Dispatch.group = 'dc_expert'"


@pytest.mark.parametrize(
    ("params", "latest", "others"),
    [
        (["Mesh.expert = 3"], "Mesh.expert = 3", ["Moe.num_experts = 16 at FILE:3"]),
        (["N = 6"], "N = 6", ["Mesh.expert = 4 at FILE:2"]),
        (
            ["Moe.num_experts = 8", "Mesh.expert = 3"],
            "Mesh.expert = 3",
            ["Moe.num_experts = 8 at --gin_param 'Moe.num_experts = 8'"],
        ),
        (
            ["Train.batch_size = 21"],
            "Train.batch_size = 21",
            ["Mesh.expert = 4 at FILE:2"],
        ),
        (["Moe.top_k = 100"], "Moe.top_k = 100", ["Moe.num_experts = 16 at FILE:3"]),
        ([DOMAIN], DOMAIN, []),
        ([DOMAIN, GROUP], GROUP, [f"{DOMAIN} at --gin_param {DOMAIN!r}"]),
        (["Data.corpus = ()", "Mesh.data = 2"], "Data.corpus = ()", []),
        ([GROUP, "Dispatch.domain = (1, 3)"], "Dispatch.domain = (1, 3)", ["FILE:2"]),
    ],
)
def test_a_broken_rule_names_the_binding_in_force_and_the_others(
    tmp_path: pathlib.Path, params: list[str], latest: str, others: list[str]
) -> None:
    path = tmp_path / "a.gin"
    path.write_text("N = 16\nMesh.expert = 4\nMoe.num_experts = %N")
    message = refusal([path], params)
    assert message.startswith(f"--gin_param {latest!r}: ")
    _, _, with_others = message.partition(" (with ")
    for other in others:
        assert other.replace("FILE", str(path)) in with_others
    assert bool(others) == bool(with_others)


def test_files_that_cannot_be_read(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tiny.gin").write_text("Train.seed = 1")
    message = refusal([tmp_path / "tinny.gin"])
    assert "No such file" in message
    assert f"nearest is {tmp_path / 'tiny.gin'}" in message
    (tmp_path / "folder.gin").mkdir()
    assert "Is a directory" in refusal([tmp_path / "folder.gin"])
    (tmp_path / "binary.gin").write_bytes(b"Train.seed = \xff\xfe")
    assert "byte 13 is not UTF-8" in refusal([tmp_path / "binary.gin"])


def test_error_in_an_included_file_names_that_file(tmp_path: pathlib.Path) -> None:
    (tmp_path / "base.gin").write_text("\nTrain.num_step = 1")
    (tmp_path / "top.gin").write_text("include 'base.gin'")
    assert refusal([tmp_path / "top.gin"]).startswith(f"{tmp_path / 'base.gin'}:2: ")
    (tmp_path / "base.gin").write_text("include 'top.gin'")
    circle = " -> ".join(str(tmp_path / n) for n in ("top.gin", "base.gin", "top.gin"))
    assert f"includes in a circle: {circle}" in refusal([tmp_path / "top.gin"])


def test_a_value_that_is_replaced_later_is_still_checked(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "a.gin").write_text("Train.num_steps = 'ten'")
    message = refusal([tmp_path / "a.gin"], ["Train.num_steps = 10"])
    assert message.startswith(f"{tmp_path / 'a.gin'}:1: ")


@pytest.mark.parametrize(
    ("value", "kind", "fragment"),
    [
        ((1, 2, 3), tuple[int, int], "a tuple of (an int, an int)"),
        ((1, "a"), tuple[int, ...], "a tuple of (an int, ...)"),
        (True, Literal[1, 2], "one of 1, 2"),
        (1, tuple[int, ...], "a tuple of (an int, ...), and is of type int"),
    ],
)
def test_convert_refuses(value: object, kind: object, fragment: str) -> None:
    with pytest.raises(TypeError, match=re.escape(fragment)):
        convert(value, kind)


def refusal(files: list[pathlib.Path], params: list[str] | None = None) -> str:
    """Return the message with which `load` refuses; it is one line."""
    with pytest.raises(ConfigError) as caught:
        load(files, params or [])
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message
