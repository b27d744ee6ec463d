"""Guards as data: the tree of a compiled frame, and the guards of it that fail for a call."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from torchguard._graphs.source_lines import SourceLine, lines_of_stack, user_line
from torchguard._torch.guards import Guards, Leaf, Stack, children_of, leaves_of

_LONGEST = 120


@dataclass(frozen=True)
class Guard:
    """One check of a compiled frame.

    Attributes:
        source: the expression it is about, such as `L['x']` or `L['self'].k`.
        type: such as `TENSOR_MATCH`.
        code: the condition.
        line: the user's source line that led to it, as text.
        stack: the lines that led to it, outermost first, on into torch; only for what was compiled while inspected.
    """

    source: str
    type: str
    code: str
    line: str
    stack: tuple[SourceLine, ...] = ()

    def __str__(self) -> str:
        return f"{self.type} {self.code}" + (f"  ({self.line})" if self.line else "")


@dataclass(frozen=True)
class GuardNode:
    """A source, the guards on it, and the sources that are reached from it."""

    source: str
    guards: tuple[Guard, ...]
    children: tuple["GuardNode", ...]

    def all_guards(self) -> Iterator[Guard]:
        yield from self.guards
        for child in self.children:
            yield from child.all_guards()


@dataclass(frozen=True)
class GuardFailure:
    """A guard that fails: the value it found, and torch's own explanation, if there is one."""

    guard: Guard
    now: str
    why: str = ""

    def __str__(self) -> str:
        return self.why or (f"{self.guard.code}, but it is {self.now}" if self.now else self.guard.code)


# The stack at which a guard was made, by its source and type; by its source and "" where the type is not known.
Stacks = Mapping[tuple[str, str], Stack]


def tree_of(guards: Guards, stacks: Stacks = MappingProxyType({})) -> GuardNode:
    return _node(guards.root, stacks)


def _node(manager: Any, stacks: Stacks) -> GuardNode:
    own = tuple(_with_lines(_guard(leaf), stacks) for leaf in leaves_of(manager))
    return GuardNode(manager.get_source(), own, tuple(_node(child, stacks) for child in children_of(manager)))


def _with_lines(guard: Guard, stacks: Stacks) -> Guard:
    stack = lines_of_stack(stacks.get((guard.source, guard.type)) or stacks.get((guard.source, "")) or ())
    return replace(guard, line=str(user_line(stack)), stack=stack) if stack else guard


def failures_of(guards: Guards, f_locals: dict[str, Any]) -> list[GuardFailure]:
    """Every guard that fails for a call with these locals, not only the first; empty if all hold."""
    guards = guards.copy()
    if guards.check(f_locals):
        return []
    found = list(_failing(guards, guards.root, f_locals, ()))
    if not found:  # a guard on several sources at once, which cannot be called by itself
        found = [GuardFailure(_guard(Leaf("", "RELATION", (guards.first_failing(f_locals),), None)), "")]
    return found


def _failing(guards: Guards, manager: Any, f_locals: dict[str, Any], above: tuple[str, ...]) -> Iterator[GuardFailure]:
    path = (*above, manager.get_source())
    leaves = leaves_of(manager)
    if leaves:
        try:
            value = guards.value(path[-1], f_locals)
        except Exception as error:  # evaluating a source runs user code: an attribute or a key may be gone
            yield GuardFailure(_guard(leaves[0]), f"gone ({type(error).__name__}: {error})")
            return
        for leaf in leaves:
            if leaf.holds is not None and not leaf.holds(value):
                # Torch explains how a tensor differs, but only when it checks from the root down.
                why = guards.part({*path}).first_failing(f_locals) if leaf.type == "TENSOR_MATCH" else ""
                now = "" if path == ("L",) else format_value(value)
                for code in _failing_code(guards, leaf, f_locals):
                    yield GuardFailure(_guard(leaf._replace(code=(code,))), now, why if path[-1] in why else "")
    for child in children_of(manager):
        yield from _failing(guards, child, f_locals, path)


def _failing_code(guards: Guards, leaf: Leaf, f_locals: dict[str, Any]) -> Iterator[str]:
    """The conditions of a guard that do not hold. Some guards have several, such as all those on sizes."""
    found = []
    for code in leaf.code if len(leaf.code) > 1 else ():
        try:
            if not guards.value(code.partition("  # ")[0].strip(), f_locals):
                found.append(code)
        except Exception:  # text for people, which need not be code
            continue
    yield from found or leaf.code[:1]


def _guard(leaf: Leaf) -> Guard:
    code, _, line = leaf.code[0].partition("  # ") if leaf.code else ("", "", "")
    return Guard(leaf.source, leaf.type, " ".join(code.split()), line.partition(" (HINT")[0].strip())


def format_value(value: Any) -> str:
    """A value in one line. No `repr` of a user's class is called: it may be long, slow or wrong."""
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested:
        grad = ", requires_grad" if value.requires_grad else ""
        layout = f"{tuple(value.shape)}, stride {tuple(value.stride())}"
        return f"{type(value).__name__}({str(value.dtype)[6:]}, {layout}, {value.device}{grad})"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    if isinstance(value, (list, tuple, dict, set, frozenset)):
        return f"{type(value).__name__} of {len(value)}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__qualname__} at {id(value):#x}"
    return f"{type(value).__name__} at {id(value):#x}"
