"""Whether a script takes an option, from its source: nothing of it runs.

The script is read, and what it imports from beside it. It takes an option

- that stands in one of its strings: argparse, click, optparse, docopt, `"--watch" in sys.argv`;
- that a parameter, a field or a string is named after, with a library that makes options of names: fire, typer.

This cannot be told where it uses `sys.argv` as a whole or keeps arguments that it does not know, computes the names of
options, runs code that is not beside it, or has an installed package read the command line; nor of a module that is
installed itself. Else it does not take it.

A variable called `device` says nothing, and neither does a docstring, unless docopt reads it. argparse also takes the
start of an option for the whole; this is left out of account.
"""

import ast
import importlib.util
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_MOST_FILES, _MOST_BYTES = 400, 2 << 20

# Libraries in which options are strings, and those that make options of names.
_PARSERS = {"argparse", "click", "configargparse", "docopt", "getopt", "optparse", "rich_click"}
_DERIVING = {
    *("absl", "argh", "chz", "clize", "cyclopts", "datargs", "defopt", "draccus", "fire", "getopt", "hydra"),
    *("jsonargparse", "plac", "pydantic_settings", "pyrallis", "sacred", "simple_parsing", "tap", "typer", "tyro"),
}
_DERIVING_CLASSES = {"HfArgumentParser", "LightningCLI", "TrlParser"}  # out of packages that do much else

# What something installed is called that may read the command line: `default_argument_parser`, `cli_main`, `TrlParser`.
_MAY_READ = re.compile(r"(^|_)(cli|argv|args|argparse|arguments?|(arg)?parser)(_|$)|(^|_)main$|[a-z](CLI|Parser)$")
_SILENT_PACKAGES = sys.stdlib_module_names - {"unittest"}

# Whatever these take of `sys.argv` stands in a string.
_EXACT_READERS = {"len", "print", "parse_args", "parse_intermixed_args", "getopt", "gnu_getopt", "docopt"}
_TOLERANT_READERS = {"parse_known_args", "parse_known_intermixed_args"}
_HANDING_ON = {"REMAINDER", "allow_extra_args", "ignore_unknown_options", "return_remaining_strings"}


@dataclass(frozen=True)
class Answer:
    """Whether an option is taken; None where that cannot be told, and why."""

    is_taken: bool | None
    why: str = ""


@dataclass
class Source:
    """What the source of a script, and of the modules beside it, tells about its options."""

    strings: dict[str, str] = field(default_factory=dict)  # each with its place
    docstrings: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  # of parameters and fields
    imported: set[str] = field(default_factory=set)
    uses_argv: bool = False
    has_keywords: bool = False  # some function takes **kwargs
    doubts: list[str] = field(default_factory=list)

    def takes(self, option: str) -> Answer:
        mention = self._mention(option)
        if mention and (self.uses_argv or self._is_deriving or self.imported & _PARSERS):
            return Answer(True)
        if self._is_deriving and self._has_name(option):
            return Answer(True)
        why = next(self._doubts_about(option, mention), "")
        return Answer(None, why) if why else Answer(False)

    @property
    def _is_deriving(self) -> bool:
        return bool(self.imported & (_DERIVING | _DERIVING_CLASSES))

    def _doubts_about(self, option: str, mention: str) -> Iterator[str]:
        yield from self.doubts
        if mention:
            yield f"{mention} mentions it, and what reads the command line is not seen"
        if self._is_deriving and not option.startswith("--"):
            yield "the library that reads the command line makes short options by itself"
        if "fire" in self.imported and self.has_keywords:
            yield "fire gives any option to a function with **kwargs"

    def _mention(self, option: str) -> str:
        """Where a string has the option as a whole word."""
        positive = option.replace("--no-", "--", 1)  # of which argparse's BooleanOptionalAction makes the other
        pattern = re.compile(rf"(?<![\w-])({re.escape(option)}|{re.escape(positive)})(?![\w-])")
        strings = {**self.strings, **(self.docstrings if "docopt" in self.imported else {})}
        return next((place for text, place in strings.items() if pattern.search(text)), "")

    def _has_name(self, option: str) -> bool:
        name = option.lstrip("-")
        spellings = {name, name.removeprefix("no-"), name.replace("-", "_"), name.removeprefix("no-").replace("-", "_")}
        return any(one in self.names or one in self.strings or f"{one}=" in self.strings for one in spellings)


def read(script: str, as_module: bool) -> Source | None:
    """What there is to read of a script, or with `as_module` of a module; None if it has no source."""
    if not as_module:
        file = Path(os.path.realpath(script))
        return _read(file, file.parent) if os.path.isfile(file) else None
    top, spec = _specs(script)
    if top is None or spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    base = Path(next(iter(top.submodule_search_locations or ()), top.origin or "")).parent
    if base.name in ("site-packages", "dist-packages") or base == Path(sysconfig.get_path("stdlib")):
        return Source(doubts=[f"{script} is installed, and what is installed is not read"])
    return _read(Path(spec.origin), base)


def _specs(module: str) -> tuple[ModuleSpec | None, ModuleSpec | None]:
    """Those of the top-level package and of what `python -m` runs; packages are not imported, which would run them."""
    first, *rest = module.split(".")
    path = sys.path if sys.flags.safe_path else [os.getcwd(), *sys.path]
    try:
        top = spec = PathFinder.find_spec(first, path) or importlib.util.find_spec(first)
    except (ImportError, ValueError):
        return None, None
    for name in rest:
        spec = _below(spec, name)
    is_package = spec is not None and spec.submodule_search_locations is not None
    return top, _below(spec, "__main__") if is_package else spec


def _below(spec: ModuleSpec | None, name: str) -> ModuleSpec | None:
    if spec is None or spec.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(f"{spec.name}.{name}", [*spec.submodule_search_locations])


def _read(start: Path, base: Path) -> Source | None:
    """Read a file, and what it imports from a directory. None if it is no Python, of which running it tells more."""
    source = Source()
    waiting, seen, size = [start], {start}, 0
    while waiting:
        file = waiting.pop(0)
        tree, length = _parsed(file)
        size += length
        if tree is None and file == start:
            return None
        label = os.path.relpath(file, base)
        if size > _MOST_BYTES or len(seen) > _MOST_FILES:
            source.doubts.append("it imports more from beside it than is read for this")
            break
        if tree is None:
            source.doubts.append(f"{label} cannot be read")
            continue
        imports = [*_imports(tree, file, base)]
        _Look(label, tree, imports, source).take()
        found = {path for one in imports for path in one.files} - seen
        waiting += sorted(found)
        seen |= found
    return source


def _parsed(file: Path) -> tuple[ast.Module | None, int]:
    try:
        text = file.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # running it warns of what is to be warned of
            return ast.parse(text), len(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None, 0


@dataclass(frozen=True)
class _Import:
    """A name that an import binds, where it comes from, and the files beside the script that this reads."""

    module: str
    name: str
    bound: str
    files: tuple[Path, ...]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


def _imports(tree: ast.Module, file: Path, base: Path) -> Iterator[_Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                yield _Import(alias.name, "", bound, (*_files(base, alias.name),))
        elif isinstance(node, ast.ImportFrom):
            above = file.parents[min(node.level, len(file.parents)) - 1] if node.level else base
            module = node.module or ""
            own = [path for path in (above / "__init__.py",) if node.level and os.path.isfile(path)]
            for alias in node.names:
                files = (*own, *_files(above, f"{module}.{alias.name}".strip(".")))
                yield _Import(module, alias.name, alias.asname or alias.name, files)


def _files(directory: Path, dotted: str) -> Iterator[Path]:
    """The files that an import reads, as far as they are in a directory."""
    for part in dotted.split("."):
        here = (directory / f"{part}.py", directory / part / "__init__.py")
        yield from (path for path in here if os.path.isfile(path))  # False as well where it may not be looked at
        directory = directory / part


class _Look:
    """Takes down what one file tells."""

    def __init__(self, label: str, tree: ast.Module, imports: Sequence[_Import], source: Source) -> None:
        self._label, self._source = label, source
        self._nodes = [*ast.walk(tree)]
        self._above = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._loaded = {one.id for one in self._nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        self._imports = {one.bound: one for one in imports}
        source.imported |= {name for one in imports for name in (one.package, one.name)}

    def take(self) -> None:
        for node in self._nodes:
            self._take_names(node)
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                is_doc = isinstance(self._above[node], ast.Expr)
                (self._source.docstrings if is_doc else self._source.strings).setdefault(node.value, self._place(node))
            self._source.uses_argv |= self._is_argv(node)
            if why := self._doubt(node):
                self._source.doubts.append(f"{self._place(node)} {why}")

    def _take_names(self, node: ast.AST) -> None:
        if isinstance(node, ast.arg):
            self._source.names.add(node.arg)
        elif isinstance(node, ast.arguments):
            self._source.has_keywords |= node.kwarg is not None
        elif isinstance(node, ast.AnnAssign) and isinstance(self._above[node], ast.ClassDef):
            self._source.names.add(_last_name(node.target))
        elif _last_name(node) in _DERIVING_CLASSES:
            self._source.imported.add(_last_name(node))

    def _place(self, node: ast.AST) -> str:
        return f"{self._label}:{getattr(node, 'lineno', 0)}"

    def _is_argv(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            bound = self._imports.get(node.id)
            return bound is not None and (bound.module, bound.name) == ("sys", "argv")
        if not isinstance(node, ast.Attribute) or node.attr not in ("argv", "orig_argv"):
            return False
        bound = self._imports.get(_last_name(node.value))
        return bound is not None and bound.module == "sys"

    def _doubt(self, node: ast.AST) -> str:
        """Why this may take any option; empty if it does not."""
        if self._is_argv(node):
            return "uses sys.argv as a whole" if self._is_whole(node) else ""
        if isinstance(node, ast.Call):
            return self._doubt_of_call(node)
        is_rest = isinstance(node, ast.keyword) and node.arg == "nargs" and getattr(node.value, "value", "") == "..."
        return "keeps arguments that it does not know" if is_rest or _spelled(node) in _HANDING_ON else ""

    def _is_whole(self, argv: ast.AST) -> bool:
        """Whether `sys.argv` serves for more than a look at one element, or for an option that stands there."""
        above = self._above[argv]
        if isinstance(getattr(argv, "ctx", None), ast.Store):
            return False
        if isinstance(above, ast.keyword):
            above = self._above[above]
        if isinstance(above, ast.Subscript):
            return self._is_whole(above) if isinstance(above.slice, ast.Slice) else not _is_constant(above.slice)
        if isinstance(above, ast.Compare):
            return not _is_constant(above.left)
        if isinstance(above, ast.Call):
            return _last_name(above.func) not in _EXACT_READERS | _TOLERANT_READERS
        return not (isinstance(above, ast.Attribute) and above.attr in ("count", "index", "remove"))

    def _doubt_of_call(self, call: ast.Call) -> str:
        name = _last_name(call.func)
        if name in _TOLERANT_READERS and not self._drops_rest(call):
            return "keeps arguments that it does not know"
        if name in ("add_argument", "add_option") and not all(map(_is_constant, call.args)):
            return "computes the names of its options"
        if name in ("run_path", "run_module") or (name == "exec" and isinstance(call.func, ast.Name)):
            return f"runs code that is not read here, by {name}"
        if name in ("import_module", "__import__") and not all(map(_is_constant, call.args[:1])):
            return "imports what is named elsewhere"
        if name in ("append", "extend", "insert") and ast.unparse(call.func).startswith("sys.path."):
            return "imports from elsewhere, by sys.path"
        if self._derives_elsewhere(call, name):
            return "makes options of what is installed elsewhere"
        return f"calls {name}, which may read the command line" if self._may_read(call, name) else ""

    def _drops_rest(self, call: ast.Call) -> bool:
        """Whether the arguments that a tolerant parser does not know are never used."""
        above = self._above[call]
        if isinstance(above, ast.Subscript):
            return isinstance(above.slice, ast.Constant) and above.slice.value == 0
        if not isinstance(above, ast.Assign) or not isinstance(above.targets[0], ast.Tuple):
            return False
        rest = above.targets[0].elts[-1]
        return isinstance(rest, ast.Name) and (rest.id.startswith("_") or rest.id not in self._loaded)

    def _derives_elsewhere(self, call: ast.Call, name: str) -> bool:
        """Whether a library is to make options of something installed: `fire.Fire(package.main)`."""
        origin = self._origin(call.func)
        if origin is None or not (origin.package in _DERIVING or name in _DERIVING_CLASSES):
            return False
        return any(given is not None and _is_elsewhere(given) for given in map(self._origin, call.args))

    def _origin(self, node: ast.AST) -> _Import | None:
        """The import that `package.module.name` starts from."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return self._imports.get(_last_name(node))

    def _may_read(self, call: ast.Call, name: str) -> bool:
        """Whether this calls something installed that may read the command line, or add options to a parser."""
        origin = self._origin(call.func)
        if origin is None or not _is_elsewhere(origin):
            return False
        name = origin.name if isinstance(call.func, ast.Name) and origin.name else name
        given = [_last_name(one).lower() for one in (*call.args, *(keyword.value for keyword in call.keywords))]
        return name not in _DERIVING_CLASSES and (bool(_MAY_READ.search(name)) or any("parser" in one for one in given))


def _is_elsewhere(origin: _Import) -> bool:
    """Whether it is installed, and nothing whose ways with the command line are known."""
    return not origin.files and origin.package not in _PARSERS | _DERIVING | _SILENT_PACKAGES


def _last_name(node: ast.AST) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", None) or ""


def _spelled(node: ast.AST) -> str:
    """A name, an attribute, a keyword or a string, as it stands there."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return _last_name(node) or getattr(node, "arg", None) or ""


def _is_constant(node: ast.AST) -> bool:
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)
