"""Read gin files and --gin_param bindings into a Config. No code of theirs is run.

Only gin's grammar is used: its parser yields statements, and this module decides what
they mean. gin's own registry has four faults that rule it out (measured with gin-config
0.5.0). It imports modules and calls functions that a file names. It accepts a string
for a number. It does not report a misspelt macro or a binding that nothing reads. It is
global, whereas two loads in one process must not affect each other.

    Train.num_steps = %STEPS     a binding; the last file or param that binds it wins
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
from train.config.from_hf import FOLDER, fields_of_folder
from train.config.names import (
    CLASSES,
    KINDS,
    PARTS,
    check_name,
    convert,
    names_in,
    nearest,
    show,
)
from train.messages import one_line, shorten

MAX_MESSAGE = 500
"""Length of a message at most, in characters."""
MAX_DEPTH = 30
"""Number of files that include one another, and of macros that use one another, in a
row at most."""
MAX_FILES = 200
"""Number of files that are read at most; a file that is included twice counts twice."""
MAX_TEXT = 2**20
"""Length of a file at most, in characters."""
MAX_ITEMS = 20_000
"""Number of items of a value at most, with its macros replaced."""


class ConfigError(ValueError):
    """A configuration error in one line: place, fault and nearest valid name."""


def load(files: Sequence[str | os.PathLike[str]], params: Sequence[str] = ()) -> Config:
    """Return the Config that `files`, then `params`, bind; the last binding wins.

    Raises ConfigError. Its text is one line, 'file:line: what is wrong; nearest valid
    name'; for a param, the place is "--gin_param 'Train.x = 3'". A broken rule is
    reported at the latest binding that it names, with the other bindings behind it.
    """
    bindings: list[_Binding] = []
    read_paths: list[str] = []
    for file in files:
        bindings += _read_file(os.path.normpath(file), read_paths)
    for param in params:
        label = f"--gin_param {shorten(repr(param), 160)}"
        bindings += _read(_Source(label, param), read_paths)
    bound = _with_folder(_evaluate(bindings))
    fields_of = {cls: {} for cls in CLASSES}
    for name, field_value in bound.items():
        cls, field = name.split(".")
        fields_of[cls][field] = field_value.value
    try:
        parts = {part: cls(**fields_of[part.title()]) for part, cls in PARTS.items()}
        return Config(**parts)
    except ValueError as err:
        raise _broken_rule(str(err), bound) from err


def render(config: Config, *, only_changed: bool = False) -> str:
    """Return every field of every class as gin bindings, which `load` reads back.

    With `only_changed` fields that have their default value are left out. `load` reads
    that back to the same configuration too.
    """
    blocks = []
    for part, cls in sorted(PARTS.items()):
        record, default = getattr(config, part), cls()
        lines = [
            f"{part.title()}.{field.name} = {getattr(record, field.name)!r}\n"
            for field in dataclasses.fields(cls)
            if not only_changed
            or getattr(record, field.name) != getattr(default, field.name)
        ]
        blocks.append("".join(lines))
    return "\n".join(block for block in blocks if block)


@dataclasses.dataclass(frozen=True)
class _Source:
    """A text with bindings: a gin file, or a --gin_param, which has no path."""

    label: str
    text: str
    path: str | None = None
    open_paths: tuple[str, ...] = ()
    """Files that are being read: each includes the next, and the last is this one."""

    def at(self, line: int) -> str:
        """Return the place of a line of this text, as error messages name it."""
        return f"{self.label}:{line}" if self.path else self.label


@dataclasses.dataclass(frozen=True)
class _Binding:
    """A name, the value that a text gives it, and the place of that text."""

    name: str
    """'Class.field', or the name of a macro, which has no dot."""
    value: Any
    where: str


@dataclasses.dataclass(frozen=True)
class _Bound:
    """The value of a field, and the binding that decided it."""

    value: Any
    where: str
    """Place of the last binding that the value depends on: the field's own one, or that
    of a macro which was replaced later."""
    rank: int
    """Position of that binding among all; a later binding has a larger rank."""


@dataclasses.dataclass(frozen=True)
class _Macro:
    """A use of a macro in a value, such as %STEPS."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclasses.dataclass(frozen=True)
class _Reference:
    """A reference to a function in a value, such as @print; it is always refused."""

    name: str

    def __repr__(self) -> str:
        return f"@{self.name}"


class _Marks(config_parser.ParserDelegate):
    """A parser delegate that leaves a mark where gin would look up a function or a
    macro."""

    def configurable_reference(
        self, scoped_configurable_name: str, evaluate: bool
    ) -> _Reference:
        return _Reference(scoped_configurable_name)

    def macro(self, macro_name: str) -> _Macro:
        return _Macro(macro_name)


def _read_file(
    path: str, read_paths: list[str], open_paths: tuple[str, ...] = ()
) -> list[_Binding]:
    """Return the bindings of a file; raise ConfigError where it cannot be read.

    `read_paths` holds the files that were read, and gets this one."""
    read_paths.append(path)
    if len(read_paths) > MAX_FILES or len(open_paths) > MAX_DEPTH:
        raise _error(
            open_paths[-1] if open_paths else path,
            f"more than {MAX_FILES} files are included, or {MAX_DEPTH} in one another; "
            "include fewer",
        )
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_TEXT + 1)
    except UnicodeDecodeError as err:
        raise _error(path, f"byte {err.start} is not UTF-8 text") from err
    except OSError as err:
        raise _error(path, f"{err.strerror}; {_nearest_file(path)}") from err
    except ValueError as err:  # a NUL in the name
        raise _error(path, f"{err}; give the path of a .gin file") from err
    if len(text) > MAX_TEXT:
        raise _error(path, f"it has more than {MAX_TEXT} characters; give a .gin file")
    return _read(_Source(path, text, path, (*open_paths, path)), read_paths)


def _read(source: _Source, read_paths: list[str]) -> list[_Binding]:
    """Return the bindings of a text and of its includes, in the order in which they
    take effect."""
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
            bindings += _read_file(path, read_paths, source.open_paths)
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
    """Return gin's statements. Errors of its tokenizer and parser become a
    ConfigError."""
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
    """Return the name that a statement binds: 'Class.field', the 'Class' of a block, or
    a macro."""
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


def _evaluate(bindings: Sequence[_Binding]) -> dict[str, _Bound]:
    """Return the typed value of each 'Class.field'. A binding that a later one replaces
    is type-checked too."""
    macros: dict[str, tuple[int, _Binding]] = {}
    for rank, binding in enumerate(bindings):
        if "." not in binding.name:
            macros[binding.name] = rank, binding
    macro_bindings = {name: binding for name, (_, binding) in macros.items()}
    used: set[str] = set()
    bound = {}
    for rank, binding in enumerate(bindings):
        if "." in binding.name:
            macros_in = _Expansion(macro_bindings)
            value = _resolve(binding, macros_in)
            sources = [(rank, binding), *(macros[name] for name in macros_in.used)]
            last_rank, last = max(sources, key=lambda source: source[0])
            value = _typed(binding, value)
            bound[binding.name] = _Bound(value, last.where, last_rank)
            used |= macros_in.used
    fields = {name.split(".")[1]: name for name in KINDS}
    for name, macro in macro_bindings.items():
        if name not in used:
            near = nearest(name, {other: f"%{other}" for other in used}, "") or nearest(
                name,
                fields if name.islower() else {},
                f"use it as %{shorten(name, 80)} or remove it",
            )
            raise _error(
                macro.where, f"the macro {shorten(name, 80)} is never used; {near}"
            )
    return bound


def _with_folder(bound: Mapping[str, _Bound]) -> dict[str, _Bound]:
    """Return the bound values with those that the folder of Model.from_hf decides.

    Raises ConfigError for a binding that disagrees with the folder's config.json.
    """
    source = bound.get(FOLDER)
    if source is None or source.value is None:
        return dict(bound)
    try:
        values = fields_of_folder(source.value, set(bound))
        read = {name: convert(value, KINDS[name]) for name, value in values.items()}
    except (ValueError, TypeError, OSError) as err:
        problem = f"{FOLDER} = {show(source.value)}: {one_line(err)}"
        raise _error(source.where, problem) from err
    for name, value in read.items():
        if name in bound and bound[name].value != value:
            raise _error(
                bound[name].where,
                f"{name} = {show(bound[name].value)}, and the config.json of {FOLDER} "
                f"= {show(source.value)} says {show(value)}: remove the binding",
            )
    where = f"{source.value}/config.json"
    given = {name: _Bound(value, where, source.rank) for name, value in read.items()}
    return given | dict(bound)


@dataclasses.dataclass
class _Expansion:
    """The macros of a value: those that there are, and those that it uses."""

    macros: Mapping[str, _Binding]
    used: set[str] = dataclasses.field(default_factory=set)
    num_items: int = 0


def _resolve(
    binding: _Binding, expansion: _Expansion, open_names: tuple[str, ...] = ()
) -> Any:
    """Return the value of a binding with its macros replaced. Their names are added to
    `expansion.used`."""
    value, where, macros = binding.value, binding.where, expansion.macros
    expansion.num_items += 1
    if expansion.num_items > MAX_ITEMS or len(open_names) > MAX_DEPTH:
        raise _error(
            where,
            f"a value has more than {MAX_ITEMS} items, or {MAX_DEPTH} macros that use "
            "one another; write it shorter",
        )
    if isinstance(value, list | tuple):
        items = (dataclasses.replace(binding, value=item) for item in value)
        return type(value)(_resolve(item, expansion, open_names) for item in items)
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
            f"define it with {shorten(value.name, 80)} = ...",
        )
        raise _error(
            where, f"the macro {shorten(repr(value), 80)} has no value; {near}"
        )
    expansion.used.add(value.name)
    return _resolve(macros[value.name], expansion, (*open_names, value.name))


def _typed(binding: _Binding, value: Any) -> Any:
    """Return the value as the field's annotation wants it, or raise ConfigError."""
    try:
        return convert(value, KINDS[binding.name])
    except TypeError as err:
        macro = f" (from {show(binding.value)})" if value != binding.value else ""
        problem = f"{binding.name} = {show(value)}{macro} {err}"
        raise _error(binding.where, problem) from err


def _find_include(name: str, source: _Source, where: str) -> str:
    """Return the path of an included file. Raises ConfigError where there is none, and
    where files include one another in a circle."""
    folders = [os.path.dirname(source.path), ""] if source.path else [""]
    paths = [os.path.normpath(os.path.join(folder, name)) for folder in folders]
    path = next((path for path in paths if os.path.isfile(path)), None)
    if path is None:
        tried = " or ".join(shorten(path, 100) for path in dict.fromkeys(paths))
        near = _nearest_file(paths[0])
        raise _error(where, f"include {show(name)}: there is no file {tried}; {near}")
    if any(os.path.realpath(path) == os.path.realpath(p) for p in source.open_paths):
        circle = " -> ".join([*source.open_paths, path])
        raise _error(where, f"includes in a circle: {circle}; remove one of them")
    return path


def _nearest_file(path: str) -> str:
    """Return a hint with the gin file of the same folder whose name is nearest."""
    folder, name = os.path.split(path)
    paths = glob.glob(os.path.join(glob.escape(folder), "*.gin"))
    return nearest(
        name, {os.path.basename(p): p for p in paths}, "give the path of a .gin file"
    )


def _broken_rule(message: str, bound: Mapping[str, _Bound]) -> ConfigError:
    """Return the error for a rule that the bound values break, latest binding first."""
    names = [name for name in names_in(message) if name in bound]
    names.sort(key=lambda name: -bound[name].rank)
    if not names:
        return _error("configuration", message)
    latest, *others = names
    shown = [
        f"{name} = {show(bound[name].value)} at {bound[name].where}" for name in others
    ]
    more = f" (with {' and '.join(shown)})" if shown else ""
    return _error(bound[latest].where, message + more)


def _error(where: str, problem: str) -> ConfigError:
    return ConfigError(shorten(" ".join(f"{where}: {problem}".split()), MAX_MESSAGE))
