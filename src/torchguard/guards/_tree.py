"""Guards as data: the tree of a compiled frame, and which of it fails for a call."""

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
    """One check: what it is about, its type, what it says, and the line of the user's that it comes from.

    `stack` is the way to that line, outermost first, and on into torch; only of what was compiled while inspected.
    """

    source: str
    type: str
    code: str
    line: str
    stack: tuple[SourceLine, ...] = ()

    def __str__(self) -> str:
        return f"{self.type} {self.code}" + (f"  ({self.line})" if self.line else "")


@dataclass(frozen=True)
class Node:
    """What a source stands for, with the guards about it and the sources that start from it."""

    source: str
    guards: tuple[Guard, ...]
    children: tuple["Node", ...]

    def all_guards(self) -> Iterator[Guard]:
        yield from self.guards
        for child in self.children:
            yield from child.all_guards()


@dataclass(frozen=True)
class Failure:
    """A guard that does not hold: what is there now, and what torch has to say about it, if anything."""

    guard: Guard
    now: str
    why: str = ""

    def __str__(self) -> str:
        return self.why or (f"{self.guard.code}, but it is {self.now}" if self.now else self.guard.code)


Stacks = Mapping[tuple[str, str], Stack]


def tree_of(guards: Guards, stacks: Stacks = MappingProxyType({})) -> Node:
    return _node(guards.root, stacks)


def _node(manager: Any, stacks: Stacks) -> Node:
    own = tuple(_located(_guard(leaf), stacks) for leaf in leaves_of(manager))
    return Node(manager.get_source(), own, tuple(_node(child, stacks) for child in children_of(manager)))


def _located(guard: Guard, stacks: Stacks) -> Guard:
    stack = lines_of_stack(stacks.get((guard.source, guard.type)) or stacks.get((guard.source, "")) or ())
    return replace(guard, line=str(user_line(stack)), stack=stack) if stack else guard


def failures_of(guards: Guards, f_locals: dict[str, Any]) -> list[Failure]:
    """Every guard that fails for a call with these locals, not only the first; none if all hold."""
    if guards.check(f_locals):
        return []
    found = list(_failing(guards, guards.root, f_locals, ()))
    if not found:  # one about several sources at once, which cannot be called by itself
        found = [Failure(_guard(Leaf("", "RELATION", (guards.first_failing(f_locals),), None)), "")]
    return found


def _failing(guards: Guards, manager: Any, f_locals: dict[str, Any], above: tuple[str, ...]) -> Iterator[Failure]:
    way = (*above, manager.get_source())
    leaves = leaves_of(manager)
    if leaves:
        try:
            value = guards.value(way[-1], f_locals)
        except Exception as error:  # the way to a value is the user's own code: an attribute or a key that is gone
            yield Failure(_guard(leaves[0]), f"gone ({type(error).__name__}: {error})")
            return
        for leaf in leaves:
            if leaf.holds is not None and not leaf.holds(value):
                # Of a tensor torch tells what differs, but only from the root down.
                why = guards.part({*way}).first_failing(f_locals) if leaf.type == "TENSOR_MATCH" else ""
                now = "" if way == ("L",) else shown(value)
                for code in _untrue(guards, leaf, f_locals):
                    yield Failure(_guard(leaf._replace(code=(code,))), now, why if way[-1] in why else "")
    for child in children_of(manager):
        yield from _failing(guards, child, f_locals, way)


def _untrue(guards: Guards, leaf: Leaf, f_locals: dict[str, Any]) -> Iterator[str]:
    """What of a guard does not hold: some say several things at once, such as all about sizes."""
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


def shown(value: Any) -> str:
    """A value in a line. Only what is short by nature is printed: a `repr` may be long, slow or wrong."""
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
