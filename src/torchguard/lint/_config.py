"""Which rules apply to a file: `[tool.torchguard.lint]` of the nearest pyproject.toml, and the command's options."""

import fnmatch
import functools
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchguard.exceptions import LintError
from torchguard.lint._rules.registry import RULES

_KEYS = ("select", "extend-select", "ignore", "exclude", "max-statements", "per-path")
_PATH_KEYS = ("select", "extend-select", "ignore")
_SKIPPED = frozenset(
    """
    .git .hg .svn .tox .nox .venv venv .eggs .mypy_cache .ruff_cache .pytest_cache __pycache__ node_modules
    """.split()
)


@dataclass(frozen=True)
class Settings:
    """What to check.

    Args:
        select: codes or their beginnings; None for the rules that are on by default. `TG` is every rule.
        extend_select: rules beside these.
        ignore: rules to leave out. Of two that match a rule, the longer one decides.
        exclude: globs of files and directories below the given paths to leave out.
        per_path: globs of paths, each with `select`, `extend-select` or `ignore` of its own. Later ones come last.
        root: the directory that the globs are relative to.
    """

    select: tuple[str, ...] | None = None
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_statements: int = 60
    per_path: tuple[tuple[str, Mapping[str, tuple[str, ...]]], ...] = ()
    root: Path = field(default_factory=Path.cwd)

    def __post_init__(self) -> None:
        for codes in (self.select or (), self.extend_select, self.ignore):
            _check_codes(codes)

    def codes_for(self, path: str | Path) -> frozenset[str]:
        """The rules that apply to a file."""
        found = _enabled(frozenset(), self.select, self.extend_select, self.ignore)
        for pattern, changes in self.per_path:
            if matches(path, pattern, self.root):
                if "select" in changes:
                    found = _enabled(found, changes["select"], (), ())
                found = _enabled(found, (), changes.get("extend-select", ()), changes.get("ignore", ()), is_change=True)
        return found

    def is_excluded(self, path: str | Path) -> bool:
        return any(matches(path, pattern, self.root) for pattern in self.exclude)

    def with_options(self, select: Iterable[str] | None, ignore: Iterable[str]) -> "Settings":
        """These settings under the command's options. `--select` replaces what the file selects and ignores."""
        changed = self if select is None else replace(self, select=tuple(select), extend_select=(), ignore=())
        return replace(changed, ignore=(*changed.ignore, *ignore))


def matches(path: str | Path, pattern: str, root: Path) -> bool:
    """Whether a path, relative to the root, or a directory above it, matches a glob."""
    relative = os.path.relpath(os.path.abspath(path), root).replace(os.sep, "/")
    if relative.startswith("../"):
        relative = str(path).replace(os.sep, "/")
    pattern = pattern.rstrip("/").removeprefix("./")
    parts = relative.split("/")
    above = ["/".join(parts[:i]) for i in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(one, pattern) for one in (*above, *parts))


def _enabled(
    known: frozenset[str],
    select: Iterable[str] | None,
    extend: Iterable[str],
    ignore: Iterable[str],
    is_change: bool = False,
) -> frozenset[str]:
    chosen, ignored = [*(select or ()), *extend], [*ignore]
    found = set[str]()
    for code, rule in RULES.items():
        wanted = _longest(code, chosen)
        unwanted = _longest(code, ignored)
        is_on = (code in known) if is_change else (select is None and rule.is_default)
        if wanted > 0 and wanted > unwanted:
            is_on = True
        elif unwanted > 0:
            is_on = False
        if is_on:
            found.add(code)
    return frozenset(found)


def _longest(code: str, prefixes: Iterable[str]) -> int:
    return max((len(one) for one in map(_spelled, prefixes) if code.startswith(one)), default=0)


def _spelled(prefix: str) -> str:
    return "TG" if prefix.upper() == "ALL" else prefix.upper()


def _check_codes(codes: Iterable[str]) -> None:
    for code in codes:
        if not any(one.startswith(_spelled(code)) for one in RULES) or not code:
            raise LintError(
                f"there is no rule {code!r}. Use a code such as TG101, a beginning such as TG1, or TG for all."
            )


def load(path: Path) -> Settings:
    """The settings of a pyproject.toml."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("torchguard", {}).get("lint", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise LintError(f"{path}: {error}") from error
    try:
        return _settings(table, path)
    except LintError as error:
        raise LintError(f"{path}, [tool.torchguard.lint]: {error}") from error


def _settings(table: Any, path: Path) -> Settings:
    if not isinstance(table, dict):
        raise LintError(f"expected a table, got {table!r}.")
    _check_keys(table, _KEYS)
    per_path = table.get("per-path", {})
    if not isinstance(per_path, dict) or not all(isinstance(one, dict) for one in per_path.values()):
        raise LintError(f"per-path: expected a table of tables, got {per_path!r}.")
    changes: list[tuple[str, Mapping[str, tuple[str, ...]]]] = []
    for pattern, given in per_path.items():
        _check_keys(given, _PATH_KEYS)
        read = {key: _texts(given, key) for key in given}
        for codes in read.values():
            _check_codes(codes)
        changes.append((pattern, read))
    longest = table.get("max-statements", 60)
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < 1:
        raise LintError(f"max-statements: expected a positive integer, got {longest!r}.")
    return Settings(
        select=_texts(table, "select") if "select" in table else None,
        extend_select=_texts(table, "extend-select"),
        ignore=_texts(table, "ignore"),
        exclude=_texts(table, "exclude"),
        max_statements=longest,
        per_path=tuple(changes),
        root=path.parent.absolute(),
    )


def _check_keys(table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            raise LintError(f"there is no setting {key!r}. Use {', '.join(known)}.")


def _texts(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise LintError(f"{key}: expected a list of strings, got {value!r}.")
    return tuple(value)


@functools.lru_cache(maxsize=4096)
def settings_for(directory: Path) -> Settings:
    """The settings of the nearest pyproject.toml with a table `[tool.torchguard.lint]`, at or above a directory."""
    for above in (directory, *directory.parents):
        path = above / "pyproject.toml"
        if path.is_file() and "torchguard" in path.read_text(encoding="utf-8", errors="replace"):
            return load(path)
    return Settings(root=directory)


def is_skipped(directory: str) -> bool:
    """Whether a directory is never read, unless it is given itself."""
    return directory in _SKIPPED
