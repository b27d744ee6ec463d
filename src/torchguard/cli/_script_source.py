"""Whether a script takes an option, read off its source. Nothing of it runs.

Read are the script and the modules that it imports from beside it. It takes an option

- that is in one of its strings: argparse, click, optparse, docopt, `"--watch" in sys.argv`;
- that is the name of a parameter, field or string, if it imports a library that makes options of names: fire, typer.

It may take any option, which is a *doubt*, if it uses `sys.argv` as a whole, keeps arguments it does not know, computes
names of options, runs code that is not beside it, or has an installed package read the command line; or if it is itself
an installed module. A variable called `device` does not count, nor does a docstring, unless docopt reads it.
Abbreviations of options, which argparse accepts, are ignored.
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
from importlib.machinery import PathFinder
from pathlib import Path

_MOST_FILES, _MOST_BYTES = 400, 2 << 20  # limits on what is read
_STDLIB = Path(sysconfig.get_path("stdlib"))

# Libraries whose options are strings, and libraries that make options of names.
_PARSERS = {"argparse", "click", "configargparse", "docopt", "getopt", "optparse", "rich_click"}
_DERIVING = {
    *("absl", "argh", "chz", "clize", "cyclopts", "datargs", "defopt", "draccus", "fire", "getopt", "hydra"),
    *("jsonargparse", "plac", "pydantic_settings", "pyrallis", "sacred", "simple_parsing", "tap", "typer", "tyro"),
}
_DERIVING_CLASSES = {"HfArgumentParser", "LightningCLI", "TrlParser"}  # of packages that mainly do something else

# Names of installed functions that may read the command line: `default_argument_parser`, `cli_main`, `TrlParser`.
_MAY_READ = re.compile(r"(^|_)(cli|argv|args|argparse|arguments?|(arg)?parser)(_|$)|(^|_)main$|[a-z](CLI|Parser)$")
_SILENT_PACKAGES = sys.stdlib_module_names - {"unittest"}

# Functions that take `sys.argv`, but only options that are strings in the source; and those that return the rest.
_EXACT_READERS = {"len", "print", "parse_args", "parse_intermixed_args", "getopt", "gnu_getopt", "docopt"}
_TOLERANT_READERS = {"parse_known_args", "parse_known_intermixed_args"}
_KEEPS_UNKNOWN = {"REMAINDER", "allow_extra_args", "ignore_unknown_options", "return_remaining_strings"}


@dataclass
class Source:
    """What the source of a script, and of the modules beside it, says about its options."""

    strings: dict[str, str] = field(default_factory=dict)  # each with its source line
    docstrings: dict[str, str] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)  # of parameters and fields
    imported: set[str] = field(default_factory=set)
    uses_argv: bool = False
    has_kwargs: bool = False  # some function takes **kwargs
    doubts: list[str] = field(default_factory=list)

    def takes(self, option: str) -> bool | None:
        """Whether the script takes an option; None if there is a doubt."""
        is_read = self.uses_argv or self._derives or self.imported & _PARSERS
        if (is_read and self._mention(option)) or (self._derives and self._has_name(option)):
            return True
        return None if self.doubt(option) else False

    def doubt(self, option: str) -> str:
        """Why the script may take an option that was not found in it; empty if it does not."""
        if self.doubts:
            return self.doubts[0]
        if mention := self._mention(option):
            return f"{mention} mentions it, and nothing that reads the command line was found"
        if self._derives and not option.startswith("--"):
            return "the library that reads the command line makes short options by itself"
        if "fire" in self.imported and self.has_kwargs:
            return "fire passes any option to a function with **kwargs"
        return ""

    @property
    def _derives(self) -> bool:
        return bool(self.imported & (_DERIVING | _DERIVING_CLASSES))

    def _mention(self, option: str) -> str:
        """The source line of a string that has the option as a whole word."""
        positive = option.replace("--no-", "--", 1)  # from which argparse's BooleanOptionalAction makes --no-
        pattern = re.compile(rf"(?<![\w-])({re.escape(option)}|{re.escape(positive)})(?![\w-])")
        strings = {**self.strings, **(self.docstrings if "docopt" in self.imported else {})}
        return next((line for text, line in strings.items() if pattern.search(text)), "")

    def _has_name(self, option: str) -> bool:
        name = option.lstrip("-")
        spellings = {name, name.removeprefix("no-"), name.replace("-", "_"), name.removeprefix("no-").replace("-", "_")}
        return any(one in self.names or one in self.strings or f"{one}=" in self.strings for one in spellings)


def read(script: str, as_module: bool) -> Source | None:
    """Read a script, or with `as_module` a module; None if it has no source or is not Python."""
    if not as_module:
        file = Path(os.path.realpath(script))
        return _read_from(file, file.parent) if os.path.isfile(file) else None
    top, *_ = script.split(".")
    path = sys.path if sys.flags.safe_path else [os.getcwd(), *sys.path]
    try:  # importlib.util.find_spec("a.b") would run a
        spec = PathFinder.find_spec(top, path) or importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    for location in () if spec is None else spec.submodule_search_locations or [spec.origin or ""]:
        base = Path(location).parent
        module = base.joinpath(*script.split("."))
        file = next(filter(os.path.isfile, (module / "__main__.py", module.with_name(f"{module.name}.py"))), None)
        if file is not None and (base.name in ("site-packages", "dist-packages") or base == _STDLIB):
            return Source(doubts=[f"{script} is installed, and installed modules are not read"])
        if file is not None:
            return _read_from(Path(file), base)
    return None


def _read_from(start: Path, base: Path) -> Source | None:
    """Read a file, and what it imports from the directory `base`."""
    source = Source()
    waiting, seen, size = [start], {start}, 0
    while waiting:
        file = waiting.pop(0)
        tree, length = _parse(file)
        size += length
        if tree is None and file == start:
            return None
        label = os.path.relpath(file, base)
        if size > _MOST_BYTES or len(seen) > _MOST_FILES:
            source.doubts.append("it imports more modules from beside it than are read")
            break
        if tree is None:
            source.doubts.append(f"{label} cannot be read")
            continue
        imports = [*_imports(tree, file, base)]
        _FileReader(label, tree, imports, source).read()
        found = {path for one in imports for path in one.files} - seen
        waiting += sorted(found)
        seen |= found
    return source


def _parse(file: Path) -> tuple[ast.Module | None, int]:
    try:
        text = file.read_bytes()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python prints them when the script runs
            return ast.parse(text), len(text)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None, 0


@dataclass(frozen=True)
class _Import:
    """A name that an import binds, where it comes from, and the files beside the script that it loads."""

    module: str
    name: str
    bound: str
    files: tuple[Path, ...]

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def is_installed(self) -> bool:
        """Whether it is not beside the script, and not known for what it does with the command line."""
        return not self.files and self.package not in _PARSERS | _DERIVING | _SILENT_PACKAGES


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
    """The files in a directory that an import loads."""
    for part in dotted.split("."):
        candidates = (directory / f"{part}.py", directory / part / "__init__.py")
        yield from filter(os.path.isfile, candidates)  # unlike Path.is_file, it never raises PermissionError
        directory = directory / part


class _FileReader:
    """Adds to a `Source` what one file says."""

    def __init__(self, label: str, tree: ast.Module, imports: Sequence[_Import], source: Source) -> None:
        self._label, self._source = label, source
        self._nodes = [*ast.walk(tree)]
        self._parent = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._loaded = {one.id for one in self._nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        self._imports = {one.bound: one for one in imports}
        source.imported |= {name for one in imports for name in (one.package, one.name)}

    def read(self) -> None:
        source = self._source
        for node in self._nodes:
            line = f"{self._label}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                is_docstring = isinstance(self._parent[node], ast.Expr)
                (source.docstrings if is_docstring else source.strings).setdefault(node.value, line)
            elif isinstance(node, ast.arg):
                source.names.add(node.arg)
            elif isinstance(node, ast.arguments):
                source.has_kwargs |= node.kwarg is not None
            elif isinstance(node, ast.AnnAssign) and isinstance(self._parent[node], ast.ClassDef):
                source.names.add(_last_name(node.target))
            elif _last_name(node) in _DERIVING_CLASSES:
                source.imported.add(_last_name(node))
            source.uses_argv |= self._is_argv(node)
            if doubt := self._doubt(node):
                source.doubts.append(f"{line} {doubt}")

    def _is_argv(self, node: ast.AST) -> bool:
        is_attribute = isinstance(node, ast.Attribute)
        bound = self._imports.get(_last_name(node.value if is_attribute else node))
        if bound is None or bound.module != "sys":
            return False
        return node.attr in ("argv", "orig_argv") if is_attribute else bound.name == "argv"

    def _doubt(self, node: ast.AST) -> str:
        """Why this node may take any option; empty if it does not."""
        if self._is_argv(node):
            return "uses sys.argv as a whole" if self._is_whole(node) else ""
        if isinstance(node, ast.Call):
            return self._doubt_of_call(node)
        is_rest = isinstance(node, ast.keyword) and node.arg == "nargs" and getattr(node.value, "value", "") == "..."
        word = _last_name(node) or getattr(node, "arg", None) or getattr(node, "value", None)
        return "keeps arguments that it does not know" if is_rest or word in _KEEPS_UNKNOWN else ""

    def _is_whole(self, argv: ast.AST) -> bool:
        """Whether `sys.argv` is used for more than one element, or than a search for one option."""
        parent = self._parent[argv]
        if isinstance(getattr(argv, "ctx", None), ast.Store):
            return False
        parent = self._parent[parent] if isinstance(parent, ast.keyword) else parent
        if isinstance(parent, ast.Subscript):
            return self._is_whole(parent) if isinstance(parent.slice, ast.Slice) else not _is_constant(parent.slice)
        if isinstance(parent, ast.Compare):
            return not _is_constant(parent.left)
        if isinstance(parent, ast.Call):
            return _last_name(parent.func) not in _EXACT_READERS | _TOLERANT_READERS
        return not (isinstance(parent, ast.Attribute) and parent.attr in ("count", "index", "remove"))

    def _doubt_of_call(self, call: ast.Call) -> str:
        name = _last_name(call.func)
        if name in _TOLERANT_READERS and not self._drops_rest(call):
            return "keeps arguments that it does not know"
        if name in ("add_argument", "add_option") and not all(map(_is_constant, call.args)):
            return "computes the names of its options"
        if name in ("run_path", "run_module") or (name == "exec" and isinstance(call.func, ast.Name)):
            return f"runs code that is not read here, by {name}"
        if name in ("import_module", "__import__") and not all(map(_is_constant, call.args[:1])):
            return "imports a module whose name is computed"
        if name in ("append", "extend", "insert") and ast.unparse(call.func).startswith("sys.path."):
            return "imports from another directory, by sys.path"
        origin = self._origin(call.func)
        return "" if origin is None else self._doubt_of_imported(call, name, origin)

    def _doubt_of_imported(self, call: ast.Call, name: str, origin: _Import) -> str:
        """Why the call of something imported may read the command line or add options to a parser."""
        if isinstance(call.func, ast.Name) and origin.name:
            name = origin.name  # `from package import name as another`
        if origin.package in _DERIVING or name in _DERIVING_CLASSES:  # such as fire.Fire(package.main)
            is_read = not any(one is not None and one.is_installed for one in map(self._origin, call.args))
            return "" if is_read else "makes options from installed code, which is not read"
        given = (_last_name(one).lower() for one in (*call.args, *(keyword.value for keyword in call.keywords)))
        may_read = origin.is_installed and (_MAY_READ.search(name) or any("parser" in one for one in given))
        return f"calls {name}, which may read the command line" if may_read else ""

    def _drops_rest(self, call: ast.Call) -> bool:
        """Whether the unknown arguments that `parse_known_args` returns are never used."""
        parent = self._parent[call]
        if isinstance(parent, ast.Subscript):
            return isinstance(parent.slice, ast.Constant) and parent.slice.value == 0
        if not isinstance(parent, ast.Assign) or not isinstance(parent.targets[0], ast.Tuple):
            return False
        rest = parent.targets[0].elts[-1]
        return isinstance(rest, ast.Name) and (rest.id.startswith("_") or rest.id not in self._loaded)

    def _origin(self, node: ast.AST) -> _Import | None:
        """The import that `package.module.name` starts from."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return self._imports.get(_last_name(node))


def _last_name(node: ast.AST) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", None) or ""


def _is_constant(node: ast.AST) -> bool:
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)
