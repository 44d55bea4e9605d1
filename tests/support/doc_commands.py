"""Shell commands in Markdown pages, and what is wrong with one."""

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import inspect
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator
from unittest import mock

import yaml

from tests.support.resolved import make_run
from train.config.gin_reader import load
from train.config.names import KINDS, check_name, convert

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES_ROOT = ROOT
"""Folder that pages are named from."""
STAND_IN = ROOT / "configs" / "tiny_cpu.gin"
"""Replaces a gin file of the reader's own, such as my.gin."""
SBATCH = "tools/launch/slurm.sbatch"
"""A script of sbatch that hands its arguments to train/main.py."""
ELLIPSES = {"..", "...", "…"}
SEPARATORS = {"&&", "||", "|", ";", "&"}
STARTS = re.compile(
    r"(?:\$ )?((?:[A-Z]+=\S+ )*(?:python|sbatch|srun|make|kubectl|\$[A-Z]+)\s.+)"
)
VARIABLE = re.compile(r'([A-Z]+)="(.*)"')
GONE = re.compile(r"[\s,(]*last at commit")
"""Words behind a command whose program is in the history alone."""
USE = re.compile(r"\$([A-Z]+)")
FROM_HF = re.compile(r"Model\.from_hf = 'models/")
"""Binding of a folder that the reader has."""


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of a page, and where it stands."""

    page: str
    line: int
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def commands_in(page: pathlib.Path) -> list[Command]:
    """Return the commands of a page, with variables such as $T replaced.

    They stand in fenced or indented code, one on a line or continued by a backslash,
    and in inline code that begins as a command does.
    """
    name, found, variables = page.relative_to(PAGES_ROOT).as_posix(), [], {}
    for number, text in _code_in(page.read_text(encoding="utf-8")):
        if assigned := VARIABLE.fullmatch(text):
            variables[assigned[1]] = USE.sub(lambda x: variables[x[1]], assigned[2])
        elif started := STARTS.fullmatch(text):
            for words in _simple_commands(started[1], variables):
                if words and not ELLIPSES & set(words):
                    found.append(Command(name, number, words))
    return found


def _code_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield the code of a page, one logical line at a time, with its line number."""
    lines, is_fenced, number = text.splitlines(), False, 0
    while number < len(lines):
        line, first = lines[number], number + 1
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            while lines[number].endswith("\\") and number + 1 < len(lines):
                number += 1
                line = f"{line.removesuffix(chr(92))} {lines[number].strip()}"
            yield first, re.sub(r"\s+#\s.*$", "", line.strip())
        number += 1
    prose = re.sub(r"(?ms)^```.*?^```", _blank, text)
    for span in re.finditer(r"(?<!`)`([^`]+)`(?!`)", prose):
        if not GONE.match(prose, span.end()):
            yield prose[: span.start()].count("\n") + 1, " ".join(span[1].split())


def _blank(fence: re.Match) -> str:
    """Return as many characters and lines as a fence has, without its code."""
    return re.sub(r"[^\n]", " ", fence[0])


def _simple_commands(text: str, variables: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield the words of each command of a line, without redirections. A variable is
    split at spaces, and quotes in it stay, as in a shell."""
    words: list[str] = []
    tokens = iter(_tokens(text))
    for token in tokens:
        if token in SEPARATORS:
            yield tuple(words)
            words = []
        elif set(token) <= set("<>&"):
            next(tokens, None)
        elif USE.fullmatch(token) and token[1:] in variables:
            words += variables[token[1:]].split()
        else:
            words.append(token)
    yield tuple(words)


def _tokens(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="<>|&;")
    lexer.whitespace_split = True
    return list(lexer)


def fault(command: Command) -> str:
    """Return what is wrong with a command; '' where nothing is."""
    words = list(command.words)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    try:
        if words[0] == "make":
            _check_make(words[1:])
        elif words[0] == "kubectl":
            _check_job_set(words)
        elif words[0] in ("python", "srun", "sbatch"):
            _check_python(words[1:])
    except (ValueError, OSError) as error:
        return " ".join(str(error).split())
    return ""


def _check_make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        pattern = rf"^{name} \??=" if is_variable else rf"^{name}:"
        if not re.search(pattern, text, re.MULTILINE):
            kind = "variable" if is_variable else "target"
            raise ValueError(f"the Makefile has no {kind} {name}")


def _check_job_set(words: list[str]) -> None:
    """Check the program of a JobSet."""
    for path in (words[i + 1] for i, word in enumerate(words) if word == "-f"):
        [workers] = yaml.safe_load((ROOT / path).read_text())["spec"]["replicatedJobs"]
        [container] = workers["template"]["spec"]["template"]["spec"]["containers"]
        _check_python([container["command"][-1], *container["args"]])


def _check_python(words: list[str]) -> None:
    """Check a script and its arguments, behind options of srun or sbatch, and the
    program behind '--'."""
    if words[0] == "-m":
        if importlib.util.find_spec(words[1]) is None:
            raise ValueError(f"there is no module {words[1]}")
        return
    while words and (words[0].startswith("-") or words[0] == "python"):
        words = words[1:]
    if not words or not (ROOT / words[0]).is_file():
        raise ValueError(f"there is no script {' '.join(words[:1])}")
    script, *rest = words
    if script == SBATCH:
        script = "train/main.py"
    if script.endswith(".py"):
        args = parsed(script, rest)
        if script == "train/main.py":
            check_config(args)
        elif isinstance(getattr(args, "gin_param", None), list):
            check_bindings(args.gin_param)
        if "--" in rest:
            _check_python(rest[rest.index("--") + 1 :])


def parsed(script: str, words: list[str]) -> argparse.Namespace:
    """Return the arguments that a script's own parser makes of `words`. Raises
    ValueError where it refuses them, or where it has none. Nothing else of the script
    runs."""
    with mock.patch.object(sys, "path", list(sys.path)):
        module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    parse = argparse.ArgumentParser.parse_args

    def parse_alone(parser, argv=None, namespace=None):
        parser.allow_abbrev = False
        raise _Reached(parse(parser, argv))

    def refuse(parser, message):
        raise ValueError(message)

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse_alone),
        mock.patch.object(argparse.ArgumentParser, "error", refuse),
        mock.patch.object(sys, "argv", [script, *words]),
    ):
        try:
            takes_words = inspect.signature(module.main).parameters
            module.main(*([words] if takes_words else []))
        except _Reached as reached:
            return reached.args[0]
        except SystemExit as end:
            raise ValueError(f"{script} ends with code {end.code}") from end
    raise ValueError(f"{script} has no argument parser")


class _Reached(BaseException):
    """A program has parsed its arguments: it goes no further."""


def check_config(args: argparse.Namespace) -> None:
    """Raise ValueError where --gin_file and --gin_param make no valid run. STAND_IN
    replaces a file without a folder that is not there, and the config.gin of a run in
    runs/. A published folder that is not there decides nothing."""
    check_bindings(args.gin_param)
    files = args.gin_file if isinstance(args.gin_file, list) else [args.gin_file]
    for i, name in enumerate(map(str, files)):
        is_there = (ROOT / name).is_file()
        if "/" in name and not name.startswith("runs/") and not is_there:
            raise ValueError(f"there is no file {name}")
        files[i] = ROOT / name if is_there else STAND_IN
    cfg = load(files, [param for param in args.gin_param if not FROM_HF.match(param)])
    balance = cfg.balance
    if balance.calibration and not (ROOT / balance.calibration).is_file():
        balance = dataclasses.replace(balance, calibration=None)
    make_run(dataclasses.replace(cfg, balance=balance))


def check_bindings(params: list[str]) -> None:
    """Raise ValueError unless each binding has a valid name and type of value."""
    for param in params:
        name, _, text = (part.strip() for part in param.partition("="))
        check_name(*name.split("."))
        try:
            convert(ast.literal_eval(text), KINDS[name])
        except TypeError as problem:
            raise ValueError(f"{param}: {problem}") from problem
