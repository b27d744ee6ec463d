"""Holding code to what was compiled.

What Dynamo compiled, guarded and gave up on, as data.
"""

import contextlib
import json
import math
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torchguard._graphs.source_lines import Place, own_place, places_of
from torchguard._torch import dynamo
from torchguard._torch.events import (
    GraphBreakEvent,
    GuardFailureEvent,
    GuardsBuiltEvent,
    add_listener,
    remove_listener,
    require_guard_events,
)
from torchguard.exceptions import GuardError, RecompileError
from torchguard.guards._audit import unobserved
from torchguard.guards._tree import Failure, Guard, Node, failures_of, tree_of
from torchguard.guards._why import advice_for

# How Dynamo words a graph break: a title, and an explanation and hints under it.
_EXPLAINED = re.compile(r"^(\S.*)\n  Explanation: (.*(?:\n    .*)*)", re.MULTILINE)
_HINT = re.compile(r"^  Hint: (.*(?:\n    .*)*)", re.MULTILINE)
# Seconds by which the time of a compilation may be off.
_CLOCK_IS_OFF = 1.0
_ANOTHER_BACKEND = Failure(Guard("", "BACKEND_MATCH", "it was compiled with another backend", ""), "")


@dataclass(frozen=True)
class Miss:
    """Something compiled before, and every guard of it that failed for the call that recompiled."""

    compile_id: str
    failures: tuple[Failure, ...]

    @property
    def is_of_another_backend(self) -> bool:
        """Whether this was never meant to be used: it is what another `torch.compile` made of the function."""
        return self.failures == (_ANOTHER_BACKEND,)

    def __str__(self) -> str:
        return "\n".join([f"  [{self.compile_id}] did not fit:", *(f"    {failure}" for failure in self.failures)])


@dataclass(frozen=True)
class Frame:
    """One compilation of a function. `seconds` is None while it is not known: it is when the block has ended."""

    function: str
    file: str
    line: int
    compile_id: str
    seconds: float | None
    cache_size: int
    guards: Node
    recompiled_for: tuple[Miss, ...]

    @property
    def guard_count(self) -> int:
        return sum(1 for _ in self.guards.all_guards())

    def __str__(self) -> str:
        took = f", {self.seconds:.2f} s" if self.seconds is not None else ""
        head = f"[{self.compile_id}] {self.function} ({self.file}:{self.line}): {self.guard_count} guards{took}"
        return "\n".join([head, *map(str, self.recompiled_for)])

    def tree(self) -> str:
        """The guards as an indented tree, for a terminal."""
        return "\n".join(_tree_lines(self.guards, ""))


def _tree_lines(node: Node, indent: str) -> Iterator[str]:
    yield f"{indent}{node.source}"
    for guard in node.guards:
        yield f"{indent}  - {guard}"
    for child in node.children:
        yield from _tree_lines(child, indent + "  ")


@dataclass(frozen=True)
class GraphBreak:
    """A line at which graphs end, and why; `stack` is the way there, and `compile_ids` the graphs that end."""

    file: str
    line: int
    reason: str
    hints: tuple[str, ...]
    stack: tuple[Place, ...]
    compile_ids: tuple[str, ...]

    def __str__(self) -> str:
        hints = (f"    {hint}" for hint in self.hints)
        return "\n".join([f"graph break at {self.file}:{self.line}: {self.reason}", *hints])


@dataclass(frozen=True)
class GivenUp:
    """A call that nothing fitted and that was not compiled either.

    The recompile limit was reached, there was nothing in it to compile, or compiling failed.
    """

    function: str
    file: str
    line: int
    compile_id: str
    recompiled_for: tuple[Miss, ...]

    def __str__(self) -> str:
        head = f"[{self.compile_id}] {self.function} ({self.file}:{self.line}): not compiled"
        return "\n".join([head, *map(str, self.recompiled_for)])


class Inspection:
    """What was compiled while it was open, in any thread."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.graph_breaks: list[GraphBreak] = []
        self.given_up: list[GivenUp] = []

    @property
    def recompiles(self) -> list[Frame]:
        """Frames for which something was compiled before, with the same backend."""
        return [one for one in self.frames if any(not miss.is_of_another_backend for miss in one.recompiled_for)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "frames": [{**asdict(frame), "guard_count": frame.guard_count} for frame in self.frames],
            "graph_breaks": [asdict(graph_break) for graph_break in self.graph_breaks],
            "given_up": [asdict(given_up) for given_up in self.given_up],
        }

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        head = f"{len(self.frames)} compiled, {len(self.recompiles)} again, {len(self.graph_breaks)} graph breaks"
        return "\n".join([head, *map(str, [*self.frames, *self.graph_breaks, *self.given_up])])


@contextlib.contextmanager
def inspect() -> Iterator[Inspection]:
    """Look at everything Dynamo compiles in a block. Nothing is reset, and nothing is run but what you run."""
    require_guard_events("inspect")
    recorder = _Recorder()
    add_listener(GraphBreakEvent, recorder.on_break)
    add_listener(GuardsBuiltEvent, recorder.on_built)
    add_listener(GuardFailureEvent, recorder.on_missed)
    try:
        yield recorder.seen
    finally:
        for listener in (recorder.on_break, recorder.on_built, recorder.on_missed):
            remove_listener(listener)
        recorder.finish()


class _Recorder:
    """Hears what Dynamo does. It compiles one frame at a time, in whatever thread."""

    def __init__(self) -> None:
        self.seen = Inspection()
        self._misses: dict[str, tuple[types.CodeType, list[Miss]]] = {}
        self._built_at: list[float] = []

    def on_missed(self, missed: GuardFailureEvent) -> None:
        if not missed.is_same_backend:
            failures = [_ANOTHER_BACKEND]
        elif missed.invalidation:
            failures = [_gone(missed.invalidation)]
        else:
            with unobserved():
                failures = failures_of(missed.guards, missed.f_locals)
        _, misses = self._misses.setdefault(missed.new_compile_id, (missed.code, []))
        misses.append(Miss(missed.compile_id, tuple(failures)))

    def on_built(self, built: GuardsBuiltEvent) -> None:
        self._fill_in_times()
        _, misses = self._misses.pop(built.compile_id, (None, []))
        frame = Frame(
            **_where(built.code),
            compile_id=built.compile_id,
            seconds=None,
            cache_size=built.entries_before + 1,
            guards=tree_of(built.guards, built.stacks()),
            recompiled_for=tuple(misses),
        )
        self.seen.frames.append(frame)
        self._built_at.append(time.time())

    def on_break(self, broken: GraphBreakEvent) -> None:
        one = _graph_break(broken)
        breaks = self.seen.graph_breaks
        # A break in a called function is met once more when that function is compiled by itself.
        same = [i for i, b in enumerate(breaks) if (b.file, b.line, b.reason) == (one.file, one.line, one.reason)]
        if same:
            breaks[same[0]] = replace(breaks[same[0]], compile_ids=breaks[same[0]].compile_ids + one.compile_ids)
        else:
            breaks.append(one)

    def finish(self) -> None:
        self._fill_in_times()
        for compile_id, (code, misses) in self._misses.items():
            self.seen.given_up.append(GivenUp(**_where(code), compile_id=compile_id, recompiled_for=tuple(misses)))

    def _fill_in_times(self) -> None:
        # Compile ids start over after a reset, so the time has to fit, too. The clock may be set a little meanwhile.
        times = dynamo.compile_times()
        for i, (frame, at) in enumerate(zip(self.seen.frames, self._built_at, strict=True)):
            if frame.seconds is None:
                its = ((max(start - at, at - start - s, 0), s) for name, start, s in times if name == frame.compile_id)
                off, seconds = min(its, default=(math.inf, None))
                self.seen.frames[i] = replace(frame, seconds=seconds if off < _CLOCK_IS_OFF else None)


def _gone(reason: str) -> Failure:
    source = reason.removeprefix("Cache line invalidated because ").removesuffix(" got deallocated")
    return Failure(Guard(source, "WEAKREF_ALIVE", reason, ""), "")


def _where(code: types.CodeType) -> dict[str, Any]:
    return {"function": code.co_qualname, "file": code.co_filename, "line": code.co_firstlineno}


def _graph_break(broken: GraphBreakEvent) -> GraphBreak:
    stack = places_of(broken.stack)
    own = own_place(stack)
    explained = [f"{title}: {_in_a_line(text)}" for title, text in _EXPLAINED.findall(broken.reason)]
    hints = dict.fromkeys(_in_a_line(hint) for hint in _HINT.findall(broken.reason))
    reason = "; then ".join(explained) or _in_a_line(broken.reason)
    return GraphBreak(own.file, own.line, reason, tuple(hints), stack, (broken.compile_id,))


def _in_a_line(text: str) -> str:
    return " ".join(text.split())


class GuardInspector:
    """The guards of a model or function, looked at once.

    What is compiled already is taken as it is. Anything else is compiled for itself, beside what you compile of it
    (torch 2.13; before, torch has one cache for both), and shares only what plain `torch.compile` made before. It runs
    as often as `run` is called.
    """

    def __init__(self, model: Callable[..., Any], **torch_compile_kwargs: Any) -> None:
        from torchguard.guards._compile import compile

        is_compiled = dynamo.cache_of(model) is not None
        if is_compiled and torch_compile_kwargs:
            raise GuardError(f"GuardInspector: this is compiled already. Leave out {', '.join(torch_compile_kwargs)}.")
        self.compiled = model if is_compiled else compile(model, **{"backend": "eager", **torch_compile_kwargs})

    def run(self, *args: Any, **kwargs: Any) -> Inspection:
        """Call it once, and tell what Dynamo did for it: nothing, if something compiled before fits."""
        with inspect() as seen:
            self.compiled(*args, **kwargs)
        return seen

    def cached(self) -> list[Frame]:
        """What is compiled for its first frame, whenever that was. Runs nothing."""
        cache = dynamo.cache_of(self.compiled)
        if cache is None:
            return []
        entries = dynamo.entries_of(cache)
        return [
            Frame(
                **_where(cache.code),
                compile_id=compile_id,
                seconds=None,
                cache_size=len(entries),
                guards=tree_of(guards),
                recompiled_for=(),
            )
            for compile_id, guards in entries
        ]


@contextlib.contextmanager
def expect_no_recompile(compiled: Any = None, inputs: Iterable[Any] = ()) -> Iterator[None]:
    """Raise a `RecompileError` at the end of a block in which something compiled before was compiled again.

    With `compiled`, nothing at all may be compiled in the block. An error of the block's own comes first.

    Args:
        compiled: what to call with each of `inputs` first, which may compile.
        inputs: what it is meant for: a tuple of arguments, a mapping of named ones, or a single argument each.
    """
    for one in inputs:
        if compiled is None:
            raise GuardError("expect_no_recompile: got inputs, but nothing to call with them. Give what is compiled.")
        if isinstance(one, Mapping):
            compiled(**one)
        else:
            compiled(*(one if isinstance(one, tuple) else (one,)))
    with inspect() as seen:
        yield
    found = [_told(frame, "compiled again") for frame in seen.frames if _missed_by(frame)]
    given_up = [one for one in seen.given_up if compiled is not None or _missed_by(one)]
    found += [_told(one, "not compiled again, and ran as it is") for one in given_up]
    if compiled is not None:
        found += [_told(frame, "compiled for the first time") for frame in seen.frames if not _missed_by(frame)]
    if found:
        raise RecompileError("\n".join(["Nothing was to be compiled again, but:", *found]))


def _missed_by(one: Frame | GivenUp) -> list[Miss]:
    return [miss for miss in one.recompiled_for if not miss.is_of_another_backend]


def _told(one: Frame | GivenUp, what: str) -> str:
    found = [f"{one.function} ({one.file}:{one.line}) was {what}"]
    for miss in _missed_by(one):
        for failure in miss.failures:
            found += [f"  [{miss.compile_id}] {failure}", f"      {advice_for(failure)}"]
    return "\n".join(found)
