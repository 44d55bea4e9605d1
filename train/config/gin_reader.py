"""gin files and --gin_param bindings to a Config, strictly, and running nothing.

Only gin's grammar is used: its parser yields statements, and what they mean is decided
here. gin's own registry imports modules and calls functions that a file names, takes a
string for a number, and says nothing about a misspelt macro or a binding that nothing
reads (measured with gin-config 0.5.0); it is also global, and two loads of one process
must not know of each other.

    Train.num_steps = %STEPS     a binding; the last file or param that has it wins
    STEPS = 50                   a macro; a later file or param may replace it
    include 'tiny_cpu.gin'       beside this file, else in the working directory
"""

import dataclasses
import glob
import os
import tokenize
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from gin import config_parser

from moejax.config import Config
from train.config.names import (
    CLASSES,
    KINDS,
    PARTS,
    blame,
    check_name,
    convert,
    nearest,
)


class ConfigError(ValueError):
    """One line: where, what is wrong, and the nearest valid name."""


def load(files: Sequence[str | os.PathLike[str]], params: Sequence[str] = ()) -> Config:
    """The Config of `files` in order, then `params` in order: the last binding wins.

    Raises ConfigError, whose text is one line, 'file:line: what is wrong; nearest valid
    name'; for params it starts with "--gin_param 'Train.x = 3'".
    """
    bindings: list[_Binding] = []
    for file in files:
        bindings += _read_file(os.path.normpath(file))
    for param in params:
        bindings += _read(_Source(f"--gin_param {param!r}", param))
    values = _evaluate(bindings)
    fields_of = {cls: {} for cls in CLASSES}
    for name, value in values.items():
        cls, field = name.split(".")
        fields_of[cls][field] = value
    try:
        parts = {part: cls(**fields_of[part.title()]) for part, cls in PARTS.items()}
        return Config(**parts)
    except ValueError as err:
        where_of = {binding.name: binding.where for binding in bindings}
        raise _error(blame(str(err), where_of), str(err)) from err


def render(config: Config) -> str:
    """Every field of every class as gin bindings, by class: `load` reads it back."""
    blocks = []
    for part, cls in sorted(PARTS.items()):
        record = getattr(config, part)
        lines = (
            f"{part.title()}.{field.name} = {getattr(record, field.name)!r}\n"
            for field in dataclasses.fields(cls)
        )
        blocks.append("".join(lines))
    return "\n".join(blocks)


@dataclasses.dataclass(frozen=True)
class _Source:
    """A text with bindings: a file, or a param, which has no path."""

    label: str
    text: str
    path: str | None = None
    open_paths: tuple[str, ...] = ()
    """The files that led here by include, this one last."""

    def at(self, line: int) -> str:
        return f"{self.label}:{line}" if self.path else self.label


@dataclasses.dataclass(frozen=True)
class _Binding:
    """`name` is 'Class.field', or that of a macro, which has no dot."""

    name: str
    value: Any
    where: str


@dataclasses.dataclass(frozen=True)
class _Macro:
    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True)
class _Reference:
    name: str

    def __repr__(self) -> str:
        return f"@{self.name}"


class _Marks(config_parser.ParserDelegate):
    """Leaves marks where gin would look up functions and macros."""

    def configurable_reference(
        self, scoped_configurable_name: str, evaluate: bool
    ) -> _Reference:
        return _Reference(scoped_configurable_name)

    def macro(self, macro_name: str) -> _Macro:
        return _Macro(macro_name)


def _read_file(path: str, open_paths: tuple[str, ...] = ()) -> list[_Binding]:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except UnicodeDecodeError as err:
        raise _error(path, f"byte {err.start} is not UTF-8 text") from err
    except OSError as err:
        raise _error(path, f"{err.strerror}; {_nearest_file(path)}") from err
    return _read(_Source(path, text, path, (*open_paths, path)))


def _read(source: _Source) -> list[_Binding]:
    """The bindings of a text and of its includes, in the order in which they act."""
    bindings: list[_Binding] = []
    first_where: dict[str, str] = {}
    for statement in _statements(source):
        where = source.at(statement.location.line_num)
        if isinstance(statement, config_parser.ImportStatement):
            known = ", ".join(sorted(CLASSES))
            raise _error(
                where,
                f"{statement.format()!r} is refused, a configuration runs no code; "
                f"what can be bound is {known}",
            )
        if isinstance(statement, config_parser.IncludeStatement):
            path = _find_include(statement.filename, source, where)
            bindings += _read_file(path, source.open_paths)
            continue
        name = _name(statement, where)
        if isinstance(statement, config_parser.BlockDeclaration):
            continue
        if name in first_where:
            raise _error(
                where,
                f"{name} is bound twice, first at {first_where[name]}; keep one, and "
                "replace it in a later file or --gin_param",
            )
        first_where[name] = where
        bindings.append(_Binding(name, statement.value, where))
    return bindings


def _statements(source: _Source) -> list[Any]:
    """gin's statements; what its tokenizer and parser raise becomes a ConfigError."""
    line, parser, statements = 1, None, []
    try:
        if "\0" in source.text:  # CPython's tokenizer answers with a SystemError
            line = source.text[: source.text.index("\0")].count("\n") + 1
            raise ValueError("a null byte")
        with warnings.catch_warnings():
            warnings.simplefilter("error", SyntaxWarning)  # '\p' in a string
            parser = config_parser.ConfigParser(source.text, _Marks())
            while (statement := parser.parse_statement()) is not None:
                statements.append(statement)
        return statements
    except SyntaxError as err:
        line, problem = err.lineno or 1, err.msg
    except tokenize.TokenError as err:
        problem, (line, _) = err.args
    except (TypeError, ValueError) as err:  # {[]: 1}; a surrogate that is not UTF-8
        line = parser.current_token.start[0] if parser else line
        problem = str(err)
    problem = problem.partition("\n    ")[2] or problem
    raise _error(
        source.at(line),
        f"syntax error: {problem.strip()}; write Class.field = value, text in quotes",
    )


def _name(statement: Any, where: str) -> str:
    """'Class.field', the 'Class' of a block, or the name of a macro."""
    cls, field = statement.selector, getattr(statement, "arg_name", None)
    if statement.scope:
        full = f"{cls}.{field}" if field else cls
        raise _error(
            where, f"nothing reads the scope {statement.scope!r}; write {full}"
        )
    if field == "":
        return cls
    try:
        return check_name(cls, field)
    except ValueError as err:
        raise _error(where, str(err)) from err


def _evaluate(bindings: Sequence[_Binding]) -> dict[str, Any]:
    """'Class.field' -> typed value; a binding that is replaced later is checked too."""
    macros = {binding.name: binding for binding in bindings if "." not in binding.name}
    used: set[str] = set()
    values = {}
    for binding in bindings:
        if "." in binding.name:
            value = _resolve(binding, macros, used)
            values[binding.name] = _typed(binding, value)
    fields = {name.split(".")[1]: name for name in KINDS}
    for name, macro in macros.items():
        if name not in used:
            near = nearest(name, {other: f"%{other}" for other in used}, "") or nearest(
                name,
                fields if name.islower() else {},
                f"use it as %{name} or remove it",
            )
            raise _error(macro.where, f"the macro {name} is never used; {near}")
    return values


def _resolve(
    binding: _Binding,
    macros: Mapping[str, _Binding],
    used: set[str],
    open_names: tuple[str, ...] = (),
) -> Any:
    """The binding's value without macros, whose names are added to `used`."""
    value, where = binding.value, binding.where
    if isinstance(value, list | tuple):
        items = (dataclasses.replace(binding, value=item) for item in value)
        return type(value)(_resolve(item, macros, used, open_names) for item in items)
    if isinstance(value, _Reference):
        raise _error(
            where,
            f"the reference {value!r} is refused, a configuration runs no code; "
            f"{binding.name} takes a literal or a %MACRO",
        )
    if not isinstance(value, _Macro):
        return value
    if value.name in open_names:
        circle = " -> ".join([*open_names, value.name])
        raise _error(where, f"macros in a circle: {circle}; give one of them a value")
    if value.name not in macros:
        near = nearest(
            value.name,
            {name: f"%{name}" for name in macros},
            f"define it with {value.name} = ...",
        )
        raise _error(where, f"the macro {value!r} has no value; {near}")
    used.add(value.name)
    return _resolve(macros[value.name], macros, used, (*open_names, value.name))


def _typed(binding: _Binding, value: Any) -> Any:
    try:
        return convert(value, KINDS[binding.name])
    except TypeError as err:
        macro = f" (from {binding.value!r})" if value != binding.value else ""
        problem = f"{binding.name} = {value!r:.80}{macro} {err}"
        raise _error(binding.where, problem) from err


def _find_include(name: str, source: _Source, where: str) -> str:
    folders = [os.path.dirname(source.path), ""] if source.path else [""]
    paths = [os.path.normpath(os.path.join(folder, name)) for folder in folders]
    path = next((path for path in paths if os.path.isfile(path)), None)
    if path is None:
        tried = " or ".join(dict.fromkeys(paths))
        near = _nearest_file(paths[0])
        raise _error(where, f"include {name!r}: there is no file {tried}; {near}")
    if any(os.path.realpath(path) == os.path.realpath(p) for p in source.open_paths):
        circle = " -> ".join([*source.open_paths, path])
        raise _error(where, f"includes in a circle: {circle}; remove one of them")
    return path


def _nearest_file(path: str) -> str:
    folder, name = os.path.split(path)
    found = glob.glob(os.path.join(glob.escape(folder), "*.gin"))
    return nearest(
        name, {os.path.basename(p): p for p in found}, "give the path of a .gin file"
    )


def _error(where: str, problem: str) -> ConfigError:
    return ConfigError(" ".join(f"{where}: {problem}".splitlines()))
