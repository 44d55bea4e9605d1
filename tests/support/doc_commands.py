"""Shell commands in Markdown pages, and what is wrong with one."""

import argparse
import ast
import contextlib
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

from moejax.config import Config
from tests.support.resolved import make_run
from train.config.gin_reader import load
from train.config.names import KINDS, check_name, convert

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES_ROOT = ROOT
"""Folder that pages are named from."""
STAND_IN = ROOT / "configs" / "tiny_cpu.gin"
"""Replaces a gin file of the reader's own, such as my.gin."""
SBATCH = ROOT / "tools" / "launch" / "slurm.sbatch"
SBATCH_FLAGS = {
    "account", "cpus-per-task", "gpus-per-node", "job-name", "nodes",
    "ntasks-per-node", "output", "partition", "qos", "requeue", "open-mode", "signal",
    "time",
}  # fmt: skip
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
    check = {"make": _check_make, "python": _check_python, "sbatch": _check_sbatch,
             "srun": _check_srun, "kubectl": _check_kubectl}.get(words[0])  # fmt: skip
    if check is None:
        return ""  # another program, such as head behind a pipe
    try:
        check(words[1:])
    except (ValueError, OSError) as error:
        return " ".join(str(error).split())
    return ""


def _check_make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for word in words:
        name, _, value = word.partition("=")
        pattern = rf"^{name} \??=" if value else rf"^{name}:"
        if not re.search(pattern, text, re.MULTILINE):
            raise ValueError(
                f"the Makefile has no {'variable' if value else 'target'} {name}"
            )


def _check_python(words: list[str]) -> None:
    if words[:1] == ["-m"]:
        if importlib.util.find_spec(words[1]) is None:
            raise ValueError(f"there is no module {words[1]}")
        return
    script, *rest = words
    if not (ROOT / script).is_file():
        raise ValueError(f"there is no script {script}")
    args = parsed(script, rest)
    if script == "train/main.py":
        check_config(args)
    elif script == "tools/launch/local.py":
        _check_local(args, rest)
    elif "--" in rest:
        _check_python(rest[rest.index("--") + 1 :])
    elif isinstance(getattr(args, "gin_param", None), list) and hasattr(
        args, "run_dir"
    ):
        check_bindings(args.gin_param)
    elif getattr(args, "gin_file", None):
        check_config(args)


def parsed(script: str, words: list[str]) -> argparse.Namespace:
    """Return the arguments that a script's own parser makes of `words`. Raises
    ValueError where it refuses them. Nothing else of the script runs."""
    parser, argv = reach_parser(script, words)
    parser.allow_abbrev = False

    def refuse(parser, message):
        raise ValueError(message)

    with (
        mock.patch.object(argparse.ArgumentParser, "error", refuse),
        mock.patch.object(sys, "argv", [script, *words]),
    ):
        try:
            return parser.parse_args(argv)
        except SystemExit as end:
            raise ValueError(f"{script} ends with code {end.code}") from end


def reach_parser(
    script: str, words: list[str]
) -> tuple[argparse.ArgumentParser, list[str] | None]:
    """Return the parser of a program that gets `words`, and the words that it would
    parse. Nothing else of the program runs. Raises ValueError where it has none."""
    with mock.patch.object(sys, "path", list(sys.path)):
        module = importlib.import_module(script.removesuffix(".py").replace("/", "."))

    def stop(parser, argv=None, namespace=None):
        raise _Reached(parser, argv)

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(sys, "argv", [script, *words]),
        contextlib.suppress(SystemExit),
    ):
        try:
            takes_words = inspect.signature(module.main).parameters
            module.main(*([words] if takes_words else []))
        except _Reached as reached:
            return reached.args
    raise ValueError(f"{script} has no argument parser")


class _Reached(BaseException):
    """A program has made its parser: it goes no further."""


def _check_local(args: argparse.Namespace, words: list[str]) -> None:
    """Check the program behind '--', and that its devices divide among processes."""
    program = words[words.index("--") + 1 :]
    _check_python(program)
    if program[0] == "train/main.py":
        cfg = check_config(parsed(program[0], program[1:]))
        number, processes = cfg.train.num_simulated_devices, args.num_processes
        if number and number % processes:
            raise ValueError(f"{number} simulated devices for {processes} processes")


def check_config(args: argparse.Namespace) -> Config:
    """Return the configuration of --gin_file and --gin_param; raise ValueError where it
    or its layout is invalid. STAND_IN replaces a file without a folder that is not
    there, and the config.gin of a run in runs/. A published folder that is not there
    decides nothing."""
    files = args.gin_file if isinstance(args.gin_file, list) else [args.gin_file]
    there = [ROOT / name if (ROOT / name).is_file() else STAND_IN for name in files]
    for name in files:
        is_of_run = str(name).startswith("runs/")
        if "/" in str(name) and not is_of_run and not (ROOT / name).is_file():
            raise ValueError(f"there is no file {name}")
    check_bindings(args.gin_param)
    params = [param for param in args.gin_param if not FROM_HF.match(param)]
    cfg = load(there, params)
    balance = cfg.balance
    if balance.calibration and not (ROOT / balance.calibration).is_file():
        balance = dataclasses.replace(balance, calibration=None)
    make_run(dataclasses.replace(cfg, balance=balance))
    return cfg


def check_bindings(params: list[str]) -> None:
    """Raise ValueError unless each binding has a valid name and type of value."""
    for param in params:
        name, _, text = (part.strip() for part in param.partition("="))
        check_name(*name.split("."))
        try:
            convert(ast.literal_eval(text), KINDS[name])
        except TypeError as problem:
            raise ValueError(f"{param}: {problem}") from problem


def _check_sbatch(words: list[str]) -> None:
    """Check sbatch's options and the script; the devices of the mesh must be those of
    the nodes."""
    options, rest = _sbatch_options(words)
    if not rest or not (ROOT / rest[0]).samefile(SBATCH):
        raise ValueError("no tools/launch/slurm.sbatch behind sbatch's options")
    args = parsed("train/main.py", rest[1:])
    check_devices(
        check_config(args), int(options["nodes"]), int(options["gpus-per-node"])
    )


def _sbatch_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return sbatch's options, those in the script included, and the words behind."""
    options = dict(re.findall(r"(?m)^#SBATCH --([\w-]+)=?(\S*)", SBATCH.read_text()))
    rest = list(words)
    while rest and rest[0].startswith("--"):
        name, _, value = rest.pop(0).removeprefix("--").partition("=")
        if name not in SBATCH_FLAGS:
            raise ValueError(f"sbatch --{name} is not in SBATCH_FLAGS of the test")
        options[name] = value
    return options, rest


def check_devices(cfg: Config, nodes: int, gpus_per_node: int) -> None:
    """Raise ValueError unless the mesh has the devices of the nodes."""
    if cfg.mesh.num_devices != nodes * gpus_per_node:
        raise ValueError(
            f"Mesh ({cfg.mesh}) has {cfg.mesh.num_devices} devices, and {nodes} nodes "
            f"of {gpus_per_node} GPUs have {nodes * gpus_per_node}"
        )


def _check_srun(words: list[str]) -> None:
    while words and words[0].startswith("-"):
        words.pop(0)
    if words[:1] == ["python"]:
        _check_python(words[1:])


def _check_kubectl(words: list[str]) -> None:
    """Check a JobSet's program; the devices of the mesh must be those of its pods."""
    for path in (words[i + 1] for i, word in enumerate(words) if word == "-f"):
        [workers] = yaml.safe_load((ROOT / path).read_text())["spec"]["replicatedJobs"]
        job = workers["template"]["spec"]
        [container] = job["template"]["spec"]["containers"]
        _, script = container["command"]
        cfg = check_config(parsed(script, container["args"]))
        limits = container["resources"]["limits"]
        check_devices(cfg, job["completions"], limits["nvidia.com/gpu"])
