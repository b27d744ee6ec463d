"""What Dynamo compiles in a block, as data: frames with their guards, recompiles and graph breaks.

`expect_no_recompile` makes a test of it.
"""

import contextlib
import json
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from torchguard._graphs.source_lines import SourceLine, lines_of_stack, user_line
from torchguard._torch import dynamo, events
from torchguard._torch.events import GraphBreakEvent, GuardFailureEvent, GuardsBuiltEvent
from torchguard.exceptions import GuardError, GuardWarning, RecompileError
from torchguard.guards._audit import audits_paused
from torchguard.guards._compile import compile
from torchguard.guards._explain import short_repr
from torchguard.guards._guard_tree import Guard, GuardFailure, GuardNode, failures_of, tree_of
from torchguard.guards._section import compile_section, inspection_data
from torchguard.guards._why import advice_for
from torchguard.report import Section, Shown

# Dynamo's message for a graph break: a title, with an explanation and hints below it.
_EXPLAINED = re.compile(r"^(\S.*)\n  Explanation: (.*(?:\n    .*)*)", re.MULTILINE)
_HINT = re.compile(r"^  Hint: (.*(?:\n    .*)*)", re.MULTILINE)
# Seconds by which the start of a compilation, in Dynamo's metrics, may differ from the clock here.
_CLOCK_TOLERANCE = 1.0
_DROPPED = GuardFailure(Guard("", "AUDIT", "a dropped guard no longer holds: the report of the audit has it", ""), "")
_NOT_RESUMED = (
    f"Dynamo does not compile the code after it: torch {torch.__version__} leaves that switched off for the whole "
    "process when two threads call functions compiled with fullgraph=True at the same time. "
    "Start a new process, and call such functions from one thread, or use torch 2.12."
)
_OTHER_BACKEND = GuardFailure(Guard("", "BACKEND_MATCH", "it was compiled with another backend", ""), "")


@dataclass(frozen=True)
class FailedEntry:
    """An entry of Dynamo's cache, and every guard of it that failed for the call that recompiled."""

    compile_id: str
    failures: tuple[GuardFailure, ...]

    @property
    def is_of_another_backend(self) -> bool:
        """Whether another `torch.compile`, with another backend, made this entry: then the call cannot use it."""
        return self.failures == (_OTHER_BACKEND,)

    def __str__(self) -> str:
        return "\n".join([f"  [{self.compile_id}] failed:", *(f"    {failure}" for failure in self.failures)])


@dataclass(frozen=True)
class CompiledFrame:
    """One compilation of a function.

    Attributes:
        function: its qualified name, defined at `file` and `line`.
        compile_id: Dynamo's id of the compilation, such as `0/1`.
        seconds: how long it took; None until the block has ended.
        cache_size: how many entries Dynamo has cached for the function, this one included.
        guards: the tree of its guards.
        recompiled_for: the entries that were cached before, each with the guards that failed; empty for a first
            compilation.
        started: when it started, in seconds since the epoch; None until the block has ended.
        dropped: the guards that a filter dropped, as `TYPE name`.
        is_audited: whether an audit checks these.
    """

    function: str
    file: str
    line: int
    compile_id: str
    seconds: float | None
    cache_size: int
    guards: GuardNode
    recompiled_for: tuple[FailedEntry, ...]
    started: float | None = None
    dropped: tuple[str, ...] = ()
    is_audited: bool = False

    @property
    def guard_count(self) -> int:
        return sum(1 for _ in self.guards.all_guards())

    def __str__(self) -> str:
        took = f", {self.seconds:.2f} s" if self.seconds is not None else ""
        dropped = f", {len(self.dropped)} dropped{'' if self.is_audited else ', unchecked'}" if self.dropped else ""
        head = (
            f"[{self.compile_id}] {self.function} ({self.file}:{self.line}): {self.guard_count} guards{dropped}{took}"
        )
        return "\n".join([head, *map(str, self.recompiled_for)])

    def tree(self) -> str:
        """The guards as an indented tree, for a terminal."""
        return "\n".join(_tree_lines(self.guards, ""))


def _tree_lines(node: GuardNode, indent: str) -> Iterator[str]:
    yield f"{indent}{node.source}"
    for guard in node.guards:
        yield f"{indent}  - {guard}"
    for child in node.children:
        yield from _tree_lines(child, indent + "  ")


@dataclass(frozen=True)
class GraphBreak:
    """A source line at which graphs end.

    Attributes:
        file, line: the user's source line.
        reason: Dynamo's explanation.
        hints: what Dynamo proposes to do about it, after what keeps it from compiling what follows, if anything.
        stack: the lines that led there, outermost first, on into torch.
        compile_ids: the compilations whose graphs end here.
    """

    file: str
    line: int
    reason: str
    hints: tuple[str, ...]
    stack: tuple[SourceLine, ...]
    compile_ids: tuple[str, ...]

    def __str__(self) -> str:
        hints = (f"    {hint}" for hint in self.hints)
        return "\n".join([f"graph break at {self.file}:{self.line}: {self.reason}", *hints])


@dataclass(frozen=True)
class NotCompiled:
    """A call that no cached entry matched and that Dynamo did not compile either.

    The recompile limit was reached, there was nothing to compile, or compiling failed.
    """

    function: str
    file: str
    line: int
    compile_id: str
    recompiled_for: tuple[FailedEntry, ...]

    def __str__(self) -> str:
        head = f"[{self.compile_id}] {self.function} ({self.file}:{self.line}): not compiled"
        return "\n".join([head, *map(str, self.recompiled_for)])


class Inspection(Shown):
    """What Dynamo compiled during an `inspect` block, in any thread. `save("compiled.html")` writes a page of it.

    Attributes:
        frames: the compilations.
        graph_breaks: the source lines at which graphs end.
        not_compiled: calls that no cached entry matched and that were not compiled.
    """

    def __init__(self) -> None:
        self.frames: list[CompiledFrame] = []
        self.graph_breaks: list[GraphBreak] = []
        self.not_compiled: list[NotCompiled] = []

    @property
    def recompiles(self) -> list[CompiledFrame]:
        """The frames that had a cached entry of the same backend before."""
        return [frame for frame in self.frames if _failed_entries(frame)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "frames": [{**asdict(frame), "guard_count": frame.guard_count} for frame in self.frames],
            "graph_breaks": [asdict(graph_break) for graph_break in self.graph_breaks],
            "not_compiled": [asdict(one) for one in self.not_compiled],
        }

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    def section(self) -> Section:
        """Compilations on a timeline, recompiles with all reasons, and graph breaks."""
        return compile_section(inspection_data(self))

    def __str__(self) -> str:
        head = f"{len(self.frames)} compiled, {len(self.recompiles)} recompiled, {len(self.graph_breaks)} graph breaks"
        return "\n".join([head, *map(str, [*self.frames, *self.graph_breaks, *self.not_compiled])])


@contextlib.contextmanager
def inspect() -> Iterator[Inspection]:
    """Record everything Dynamo compiles in a block. Nothing is reset, and nothing runs but the block.

    Warns with a `GuardWarning` where torch 2.11 does not compile the code after a graph break.
    """
    events.require_guard_events("inspect")
    recorder = _InspectionRecorder()
    events.add_listener(GraphBreakEvent, recorder.on_break)
    events.add_listener(GuardsBuiltEvent, recorder.on_built)
    events.add_listener(GuardFailureEvent, recorder.on_missed)
    try:
        yield recorder.inspection
    finally:
        for listener in (recorder.on_break, recorder.on_built, recorder.on_missed):
            events.remove_listener(listener)
        recorder.finish()
    broken = [one for one in recorder.inspection.graph_breaks if _NOT_RESUMED in one.hints]
    if broken:
        warnings.warn(f"inspect: graph break at {broken[0].file}:{broken[0].line}. {_NOT_RESUMED}", GuardWarning, 3)


class _InspectionRecorder:
    """Fills an `Inspection` from Dynamo's events. Dynamo compiles one frame at a time, in whatever thread."""

    def __init__(self) -> None:
        self.inspection = Inspection()
        # By compile id, until that compilation is done: the function, and the cached entries that failed.
        self._failed: dict[str, tuple[dynamo.FunctionName, list[FailedEntry]]] = {}
        self._built_at: list[float] = []

    def on_missed(self, missed: GuardFailureEvent) -> None:
        if not missed.is_same_backend:
            failures = [_OTHER_BACKEND]
        elif missed.invalidation:
            failures = [_deallocated(missed.invalidation)]
        else:
            with audits_paused():
                failures = failures_of(missed.guards, missed.f_locals)
            if not failures and missed.guards.is_audited:
                failures = [_DROPPED]
        where = dynamo.function_name(missed.code, missed.f_locals)
        _, entries = self._failed.setdefault(missed.new_compile_id, (where, []))
        entries.append(FailedEntry(missed.compile_id, tuple(failures)))

    def on_built(self, built: GuardsBuiltEvent) -> None:
        self._fill_in_times()
        _, entries = self._failed.pop(built.compile_id, (None, []))
        frame = CompiledFrame(
            **built.where._asdict(),
            compile_id=built.compile_id,
            seconds=None,
            cache_size=built.entries_before + 1,
            guards=tree_of(built.guards, built.stacks()),
            recompiled_for=tuple(entries),
            dropped=tuple(f"{type} {name}" for type, name in built.dropped),
            is_audited=built.unfiltered is not None,
        )
        self.inspection.frames.append(frame)
        self._built_at.append(time.time())

    def on_break(self, broken: GraphBreakEvent) -> None:
        one = _graph_break(broken)
        breaks = self.inspection.graph_breaks
        # A break in a called function is reported a second time when that function is compiled by itself.
        same = [i for i, b in enumerate(breaks) if (b.file, b.line, b.reason) == (one.file, one.line, one.reason)]
        if same:
            breaks[same[0]] = replace(breaks[same[0]], compile_ids=breaks[same[0]].compile_ids + one.compile_ids)
        else:
            breaks.append(one)

    def finish(self) -> None:
        self._fill_in_times()
        for compile_id, (where, entries) in self._failed.items():
            one = NotCompiled(**where._asdict(), compile_id=compile_id, recompiled_for=tuple(entries))
            self.inspection.not_compiled.append(one)

    def _fill_in_times(self) -> None:
        # Compile ids start over after a reset, so metrics must match in time, too. The clock may be adjusted meanwhile.
        times = dynamo.compile_times()
        frames = self.inspection.frames
        for i, (frame, at) in enumerate(zip(frames, self._built_at, strict=True)):
            if frame.seconds is None:
                own = (one for one in times if one[0] == frame.compile_id)
                its = ((max(start - at, at - start - s, 0), s, start) for _, start, s in own)
                difference, seconds, started = min(its, default=(math.inf, None, None))
                if difference < _CLOCK_TOLERANCE:
                    frames[i] = replace(frame, seconds=seconds, started=started)


def _deallocated(reason: str) -> GuardFailure:
    source = reason.removeprefix("Cache line invalidated because ").removesuffix(" got deallocated")
    return GuardFailure(Guard(source, "WEAKREF_ALIVE", reason, ""), "")


def _graph_break(broken: GraphBreakEvent) -> GraphBreak:
    stack = lines_of_stack(broken.stack)
    line = user_line(stack)
    explained = [f"{title}: {_on_one_line(text)}" for title, text in _EXPLAINED.findall(broken.reason)]
    hints = dict.fromkeys(_on_one_line(hint) for hint in _HINT.findall(broken.reason))
    reason = "; then ".join(explained) or _on_one_line(broken.reason)
    missing = () if broken.is_resumed else (_NOT_RESUMED,)
    return GraphBreak(line.file, line.line, reason, (*missing, *hints), stack, (broken.compile_id,))


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


class GuardInspector:
    """Inspects the guards of one model or function.

    A model that is compiled already is used as it is. Anything else is compiled with a cache of its own, apart from
    what you compile of it (from torch 2.13 on; before, torch has one cache for both); only entries that plain
    `torch.compile` cached before are shared. The model runs once for each call of `run`.
    """

    def __init__(self, model: Callable[..., Any], **torch_compile_kwargs: Any) -> None:
        if not callable(model):
            raise GuardError(
                f"GuardInspector: expected a model or a function, got {short_repr(model)} ({type(model).__name__})."
            )
        is_compiled = dynamo.cache_of(model) is not None
        if is_compiled and torch_compile_kwargs:
            raise GuardError(f"GuardInspector: this is compiled already. Leave out {', '.join(torch_compile_kwargs)}.")
        self.compiled = model if is_compiled else compile(model, **{"backend": "eager", **torch_compile_kwargs})

    def run(self, *args: Any, **kwargs: Any) -> Inspection:
        """Call it once, and return what Dynamo compiled for it: nothing, if a cached entry matches."""
        with inspect() as inspection:
            self.compiled(*args, **kwargs)
        return inspection

    def cached(self) -> list[CompiledFrame]:
        """What Dynamo has cached for the first frame of a call. Runs nothing."""
        cache = dynamo.cache_of(self.compiled)
        if cache is None:
            return []
        entries = dynamo.entries_of(cache)
        return [
            CompiledFrame(
                **dynamo.function_name(cache.code)._asdict(),
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
    """Raise a `RecompileError` at the end of a block in which Dynamo recompiled a function.

    With `compiled`, Dynamo may compile nothing at all in the block. An exception that the block raises comes first.

    Args:
        compiled: a compiled function, called with each of `inputs` before the block, where it may compile.
        inputs: the inputs it has to support: each a tuple of arguments, a mapping of named ones, or a single argument.
    """
    for one in inputs:
        if compiled is None:
            raise GuardError(
                "expect_no_recompile: got inputs, but nothing to call with them. Give the compiled function, too."
            )
        if isinstance(one, Mapping):
            compiled(**one)
        else:
            compiled(*(one if isinstance(one, tuple) else (one,)))
    with inspect() as inspection:
        yield
    found = [_describe(frame, "recompiled") for frame in inspection.recompiles]
    not_compiled = [one for one in inspection.not_compiled if compiled is not None or _failed_entries(one)]
    found += [_describe(one, "not recompiled, and ran eagerly") for one in not_compiled]
    if compiled is not None:
        first = [frame for frame in inspection.frames if not _failed_entries(frame)]
        found += [_describe(frame, "compiled for the first time") for frame in first]
    if found:
        raise RecompileError("\n".join(["No recompile was expected in this block, but:", *found]))


def _failed_entries(one: CompiledFrame | NotCompiled) -> list[FailedEntry]:
    return [entry for entry in one.recompiled_for if not entry.is_of_another_backend]


def _describe(one: CompiledFrame | NotCompiled, what: str) -> str:
    lines = [f"{one.function} ({one.file}:{one.line}) was {what}"]
    for entry in _failed_entries(one):
        for failure in entry.failures:
            lines += [f"  [{entry.compile_id}] {failure}", f"      {advice_for(failure)}"]
    return "\n".join(lines)
