"""The user's source line behind a graph node, a stack or an error: the one place that finds it.

There are two kinds of stacks, and two rules for what is the user's code.

- Dynamo records the stack of each guard, graph break and node. It holds traced code alone, so only the frames inside
  torch are skipped: `nn.Linear.forward` is replaced by the line that calls the layer. Torchguard's own frames count,
  since a caller may have to tell its own nodes from the user's.
- A live Python stack, or the traceback of an error, also holds the code that traces: torchguard, the standard library
  and generated code such as `<eval_with_key>`. All of these are skipped.
"""

import os
import re
import sys
import sysconfig
import traceback
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import fx

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_TORCHGUARD = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
# A frame in the text of a stack trace; the text of the line is missing where the file cannot be read.
_FRAME = re.compile(r'File "([^"]*)", line (\d+), in (.*)(?:\n(?!\s*File ")\s*(.*))?')


@dataclass(frozen=True)
class SourceLine:
    """A line of code. `text` is empty where it was not recorded."""

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.text}" if self.text else "")

    @property
    def short(self) -> str:
        """`model.py:12 in forward`."""
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"


# Stacks that Dynamo recorded.


def lines_of_stack(stack: Iterable[traceback.FrameSummary]) -> tuple[SourceLine, ...]:
    """The lines of a stack, outermost first."""
    return tuple(SourceLine(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in stack)


@lru_cache(maxsize=4096)
def lines_of_trace(stack_trace: str) -> tuple[SourceLine, ...]:
    """The lines of a stack trace in text form, such as `node.meta["stack_trace"]`, outermost first."""
    found = _FRAME.findall(stack_trace)
    return tuple(SourceLine(file, int(line), function, text.strip()) for file, line, function, text in found)


def user_line(stack: Sequence[SourceLine]) -> SourceLine:
    """The innermost line outside torch; the innermost of all if there is none."""
    return next((line for line in reversed(stack) if not line.file.startswith(_TORCH)), stack[-1])


def source_line_of(*nodes: fx.Node) -> SourceLine | None:
    """The user's source line of the first of these nodes that has a stack trace."""
    trace = next((trace for node in nodes if (trace := node.meta.get("stack_trace"))), "")
    stack = lines_of_trace(trace)
    return user_line(stack) if stack else None


# Live Python stacks.


def caller_line() -> SourceLine:
    """The user's innermost line on the current stack; the outermost line of all if there is none."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return SourceLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def error_line(error: BaseException) -> SourceLine | None:
    """The user's innermost line that an error passed through."""
    stack = lines_of_stack(traceback.extract_tb(error.__traceback__))
    return next((line for line in reversed(stack) if _is_user_file(line.file)), None)


def definition_line(code: types.CodeType) -> SourceLine:
    """The line at which a function is defined."""
    return SourceLine(code.co_filename, code.co_firstlineno, code.co_name)


def _is_user_file(file: str) -> bool:
    is_standard = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return not is_standard and not file.startswith((_TORCH, _TORCHGUARD, "<"))
