"""Checking one file: parse it, run the rules, apply `# noqa`."""

import ast
import hashlib
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, NamedTuple

from torchguard.lint._config import Settings
from torchguard.lint._finding import UNREADABLE, Finding
from torchguard.lint._module import Module
from torchguard.lint._rules.base import Problem, Rule
from torchguard.lint._rules.registry import RULES
from torchguard.lint._rules.testing import MissingLossTests

LONGEST = 4 * 1024 * 1024  # bytes: no one writes a longer file by hand
_NOQA = re.compile(r"#\s*noqa(?!\w)(?:\s*:\s*(?P<codes>[A-Za-z]+[0-9]*(?:[\s,]+[A-Za-z]+[0-9]+)*))?", re.IGNORECASE)
_FILE_NOQA = re.compile(r"^\s*#\s*torchguard:\s*noqa(?:\s*:\s*(?P<codes>[A-Z0-9,\s]+))?\s*$", re.MULTILINE)


class Checked(NamedTuple):
    """The findings of every rule in a file, whatever is selected, and its losses: what the cache holds."""

    findings: list[tuple[int, int, str, str]]
    losses: list[tuple[str, int, int, bool]]


def check_source(source: str, file: str = "<string>", settings: Settings | None = None) -> list[Finding]:
    """The findings in source code, sorted by line.

    Args:
        file: the name of the file, which the findings carry and the settings' globs are matched with.
        settings: which rules to apply; by default, those that are on by default.

    >>> from torchguard import lint
    >>> lint.check_source("import torch\\nx = torch.zeros(3)  # noqa: TG110\\n")
    []
    """
    settings = settings or Settings()
    return selected(check(source, settings.max_statements), file, settings.codes_for(file))


def check_bytes(content: bytes, max_statements: int) -> Checked:
    """Check the content of a file."""
    if len(content) > LONGEST:
        return _unreadable(f"has {len(content)} bytes, more than {LONGEST}: too long to check.")
    if b"\0" in content:
        return _unreadable("is no text: it holds null bytes.")
    try:
        encoding, _ = tokenize.detect_encoding(BytesIO(content).readline)
        source = content.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        return _unreadable(f"is no text: {error}.")
    return check(source, max_statements)


def check(source: str, max_statements: int) -> Checked:
    """Every finding of every rule, but those that `# noqa` silences."""
    try:
        with _deep_recursion():
            module = Module(source, options={"max-statements": max_statements})
            return Checked(sorted(_findings(module)), MissingLossTests.losses_of(module))
    except SyntaxError as error:
        return _unreadable(f"is no valid Python: {error.msg}.", error.lineno or 1, error.offset or 1)
    except (RecursionError, MemoryError):
        return _unreadable("is nested too deeply to check.")
    except ValueError as error:  # of ast.parse: a null byte, a lone surrogate
        return _unreadable(f"cannot be parsed: {error}.")
    except Exception as error:  # a defect of a rule must not cost the findings in all other files
        return _unreadable(f"could not be checked, a defect of torchguard: {type(error).__name__}: {error}.")


def selected(checked: Checked, file: str, codes: Collection[str]) -> list[Finding]:
    return [
        Finding(file, line, column, code, message)
        for line, column, code, message in checked.findings
        if code in codes or code == UNREADABLE
    ]


def _unreadable(problem: str, line: int = 1, column: int = 1) -> Checked:
    return Checked([(line, column, UNREADABLE, f"the file {problem}")], [])


def _rules_by_node() -> dict[type[ast.AST], list[Rule]]:
    found: dict[type[ast.AST], list[Rule]] = defaultdict(list)
    for rule in RULES.values():
        for kind in rule.nodes:
            found[kind].append(rule)
    return found


_BY_NODE = _rules_by_node()


def problems(module: Module) -> Iterator[tuple[Rule, Problem]]:
    """What each rule finds in a file."""
    for kind, rules in _BY_NODE.items():
        for node in module.nodes[kind]:
            for rule in rules:
                for problem in rule.check(node, module):
                    yield rule, problem


def _findings(module: Module) -> Iterator[tuple[int, int, str, str]]:
    silenced = _silenced(module)
    if silenced is None:
        return
    seen: set[tuple[int, int, str]] = set()
    for rule, problem in problems(module):
        node = problem.node
        line, column = _start(node, module)
        end = _last_line(node, module)
        if (line, column, rule.code) in seen or any(rule.code.startswith(code) for code in silenced):
            continue
        if not any(is_silenced(module.lines[i - 1], rule.code) for i in {line, end} if i <= len(module.lines)):
            seen.add((line, column, rule.code))
            yield line, column, rule.code, problem.message


def _start(node: ast.AST, module: Module) -> tuple[int, int]:
    """Line and column from 1. Python counts columns in bytes, people in characters."""
    line, offset = node.lineno, node.col_offset  # pyright: ignore[reportAttributeAccessIssue]
    written = module.lines[line - 1] if line <= len(module.lines) else ""
    if not written.isascii():
        offset = len(written.encode()[:offset].decode(errors="replace"))
    return line, offset + 1


def _last_line(node: ast.AST, module: Module) -> int:
    """The last line of the statement, or of its header: where a comment on the whole of it stands."""
    while not isinstance(node, ast.stmt):
        parent = next(module.parents(node), None)
        if parent is None:
            break
        node = parent
    body = getattr(node, "body", None)
    if isinstance(body, list) and body:
        return max(node.lineno, body[0].lineno - 1)  # pyright: ignore[reportAttributeAccessIssue]
    return node.end_lineno or node.lineno  # pyright: ignore[reportAttributeAccessIssue]


def is_silenced(line: str, code: str) -> bool:
    """Whether `# noqa` or `# noqa: TG101` in a line applies to a code. `# noqa: TG1` applies to all that start so."""
    found = _NOQA.search(line) if "noqa" in line.lower() else None
    if found is None:
        return False
    codes = found["codes"]
    return codes is None or any(code.startswith(one) for one in re.split(r"[\s,]+", codes.upper()) if one)


def _silenced(module: Module) -> list[str] | None:
    """The codes that `# torchguard: noqa: TG101` silences in a whole file; None for all."""
    found: list[str] = []
    for one in _FILE_NOQA.finditer(module.source):
        if one["codes"] is None:
            return None
        found += [code for code in re.split(r"[\s,]+", one["codes"]) if code]
    return found


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Room for long sums and deeply nested literals. Python code calling Python code takes no C stack."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 8_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def key_of(content: bytes, max_statements: int) -> str:
    """What the result for a file depends on, beside the rules: its content and options."""
    return hashlib.sha256(content + str(max_statements).encode()).hexdigest()


def to_data(checked: Checked) -> Any:
    return [checked.findings, checked.losses]


def from_data(data: Any) -> Checked:
    """Raises ValueError or TypeError for data of another form."""
    findings, losses = data
    return Checked(
        [(int(line), int(column), str(code), str(message)) for line, column, code, message in findings],
        [(str(name), int(line), int(column), bool(shared)) for name, line, column, shared in losses],
    )
