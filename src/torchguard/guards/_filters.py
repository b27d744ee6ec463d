"""Which guards a compiled function keeps, in terms that can be combined, printed and asked for reasons.

A filter is what `torch.compile(options={"guard_filter_fn": ...})` takes. Every guard it drops is a change of the world
that the compiled function no longer notices.
"""

import abc
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchguard._torch.guards import guard_sources, guard_types, unserializable_guard_types
from torchguard.exceptions import FilterError
from torchguard.guards._explain import Entry, Explanation, describe, one_line

KINDS = ("global", "local", "module", "closure", "state")

# What torch drops with `caching_precompile`; its list is inside of a function.
_NOT_PRECOMPILED = ("ID_MATCH", "CLOSURE_MATCH", "WEAKREF_ALIVE", "DICT_VERSION")
_NOT_PRECOMPILED_WITHIN = ("ID_MATCH", "DICT_VERSION")

FilterFunction = Callable[[Sequence[Entry]], Sequence[bool]]


class Filter(abc.ABC):
    """Says of each guard whether to keep it. `a & b` keeps what both keep, `a | b` what either does, `~a` the rest.

    As with `and` and `or`, the right side is only asked about what the left side leaves open.

    >>> ~of_type("ID_MATCH") & ~from_source("global")
    ~of_type('ID_MATCH') & ~from_source('global')
    """

    def __call__(self, entries: Sequence[Entry]) -> list[bool]:
        """True for each guard to keep."""
        entries = list(entries)
        return self._answer(entries, [True] * len(entries))

    @abc.abstractmethod
    def _answer(self, entries: list[Entry], asked: list[bool]) -> list[bool]:
        """True for each guard that is asked about and to be kept."""

    def explain(self, entries: Sequence[Entry]) -> Explanation:
        """What it makes of these guards, in words."""
        entries = list(entries)
        guards = [(describe(entry), keep) for entry, keep in zip(entries, self(entries), strict=True)]
        return Explanation(
            repr(self),
            kept=tuple(guard for guard, keep in guards if keep),
            dropped=tuple(guard for guard, keep in guards if not keep),
        )

    def __and__(self, other: "Filter") -> "Filter":
        return _Both(self, other) if isinstance(other, Filter) else NotImplemented

    def __or__(self, other: "Filter") -> "Filter":
        return _Either(self, other) if isinstance(other, Filter) else NotImplemented

    def __invert__(self) -> "Filter":
        return _Opposite(self)


class _Both(Filter):
    def __init__(self, left: Filter, right: Filter) -> None:
        self.left, self.right = left, right

    def _answer(self, entries: list[Entry], asked: list[bool]) -> list[bool]:
        return self.right._answer(entries, self.left._answer(entries, asked))

    def __repr__(self) -> str:
        sides = (self.left, self.right)
        return " & ".join(f"({side!r})" if isinstance(side, _Either) else repr(side) for side in sides)


class _Either(Filter):
    def __init__(self, left: Filter, right: Filter) -> None:
        self.left, self.right = left, right

    def _answer(self, entries: list[Entry], asked: list[bool]) -> list[bool]:
        left = self.left._answer(entries, asked)
        right = self.right._answer(entries, [ask and not kept for ask, kept in zip(asked, left, strict=True)])
        return [one or other for one, other in zip(left, right, strict=True)]

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


class _Opposite(Filter):
    def __init__(self, inner: Filter) -> None:
        self.inner = inner

    def _answer(self, entries: list[Entry], asked: list[bool]) -> list[bool]:
        return [ask and not kept for ask, kept in zip(asked, self.inner._answer(entries, asked), strict=True)]

    def __repr__(self) -> str:
        return f"~({self.inner!r})" if isinstance(self.inner, _Both | _Either) else f"~{self.inner!r}"


class _Each(Filter):
    """Decides guard by guard."""

    def __init__(self, text: str, keeps: Callable[[Entry], bool]) -> None:
        self.text, self.keeps = text, keeps

    def _answer(self, entries: list[Entry], asked: list[bool]) -> list[bool]:
        return [ask and self._ask(entry) for entry, ask in zip(entries, asked, strict=True)]

    def _ask(self, entry: Entry) -> bool:
        try:
            answer = self.keeps(entry)
        except Exception as error:
            raise _raised(self, error, _place(entry)) from error
        return _exact_bool(self, answer, entry)

    def __repr__(self) -> str:
        return self.text


class _Whole(Filter):
    """Decides by a function in torch's form, which may look at all guards at once: it is always shown all."""

    def __init__(self, text: str, decide: FilterFunction) -> None:
        self.text, self.decide = text, decide

    def _answer(self, entries: list[Entry], asked: list[bool]) -> list[bool]:
        try:
            answers = self.decide(list(entries))
        except FilterError:
            raise
        except Exception as error:
            raise _raised(self, error, self._where(entries)) from error
        if not isinstance(answers, Sequence):
            raise FilterError(f"{self!r} returned {type(answers).__name__}. Return a list with one bool a guard.")
        if len(answers) != len(entries):
            raise FilterError(
                f"{self!r} returned {len(answers)} answers for {len(entries)} guards{_unanswered(answers, entries)}. "
                "Return one bool a guard, in their order."
            )
        return [
            _exact_bool(self, answer, entry) and ask for answer, entry, ask in zip(answers, entries, asked, strict=True)
        ]

    def _where(self, entries: list[Entry]) -> str:
        """The guard it raises for, found by asking again about one at a time."""
        for entry in entries:
            try:
                self.decide([entry])
            except Exception:
                return _place(entry)
        return f"{len(entries)} guards, at none of them alone"

    def __repr__(self) -> str:
        return self.text


def _place(entry: Entry) -> str:
    return f"guard {entry.name or 'without a name'} ({entry.guard_type})"


def _raised(filter: Filter, error: Exception, where: str) -> FilterError:
    return FilterError(f"{filter!r} raised {type(error).__name__} at {where}: {error}")


def _exact_bool(filter: Filter, answer: object, entry: Entry) -> bool:
    if answer is True or answer is False:
        return answer
    raise FilterError(
        f"{filter!r} answered {one_line(answer)} ({type(answer).__name__}) for {_place(entry)}. "
        "Answer True to keep it or False to drop it, not something like them."
    )


def _unanswered(answers: Sequence[object], entries: Sequence[Entry]) -> str:
    return f": the first without one is {_place(entries[len(answers)])}" if len(answers) < len(entries) else ""


# Building blocks: each keeps what it names, and drops the rest.


def of_type(*types: str) -> Filter:
    """Keep guards of these types, such as "TENSOR_MATCH"."""
    _check_known("of_type", "guard type", types, guard_types())
    return _Each(_call("of_type", types), lambda entry: entry.guard_type in types)


def of_derived_type(*types: str) -> Filter:
    """Keep guards that come down to one of these types: a "CONSTANT_MATCH" of None, say, to a "NONE_MATCH"."""
    _check_known("of_derived_type", "guard type", types, guard_types())
    wanted = frozenset(types)
    return _Each(_call("of_derived_type", types), lambda entry: not wanted.isdisjoint(entry.derived_guard_types))


def named(*patterns: str) -> Filter:
    """Keep guards whose whole name fits one of these, where `*` stands for any text and `?` for one character.

    Names are Python expressions, with arguments by their name and globals in `G`: `x`, `self._modules['fc'].training`,
    `G['LIMIT']`. Brackets stand for themselves. Guards on the state of torch have an empty name.
    """
    _check_some("named", "pattern", patterns)
    fits = [re.compile(_glob_to_regex(pattern), re.DOTALL).fullmatch for pattern in patterns]
    return _Each(_call("named", patterns), lambda entry: any(fit(entry.name) is not None for fit in fits))


def from_source(*kinds: str) -> Filter:
    """Keep guards on what is reached from one of these.

    "global": a global variable. "local": an argument. "closure": a variable of an enclosing function.
    "module": an `nn.Module` and its attributes. "state": no variable at all, such as grad mode and relations of shapes.
    A guard on an attribute of a global module is both of "global" and "module".
    """
    _check_known("from_source", "kind of source", kinds, KINDS)
    return _Each(
        _call("from_source", kinds),
        lambda entry: any(kind in kinds for kind in guard_sources(entry.orig_guard)),
    )


def with_value(predicate: Callable[[Any], bool], text: str | None = None) -> Filter:
    """Keep guards on a value for which `predicate` is True. Those without a value are dropped.

    Args:
        text: the predicate as it is to be printed; left out, its name.

    >>> named("y") & with_value(lambda value: value is None, "lambda value: value is None")
    named('y') & with_value(lambda value: value is None)
    """
    return _Each(
        f"with_value({text or _name_of(predicate)})", lambda entry: predicate(entry.value) if entry.has_value else False
    )


def by_function(fn: FilterFunction, name: str | None = None) -> Filter:
    """Keep what a function in torch's form keeps: it takes the list of guards and returns a list of bools.

    Args:
        name: the function as it is to be printed; left out, its name.

    >>> by_function(torch.compiler.skip_guard_on_globals_unsafe) & of_type("TENSOR_MATCH")
    by_function(skip_guard_on_globals_unsafe) & of_type('TENSOR_MATCH')
    """
    if not callable(fn):
        raise FilterError(f"{one_line(fn)} ({type(fn).__name__}) is no filter: it cannot be called.")
    return _Whole(f"by_function({name or _name_of(fn)})", fn)


# Filters that have names. The first six are torch's own, whatever its version.


def skip_inbuilt_nn_modules() -> Filter:
    """Drop guards on torch's own modules. Switching Dropout to `.eval()` goes unnoticed."""
    return _Whole("skip_inbuilt_nn_modules()", torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe)


def skip_nn_modules() -> Filter:
    """Drop guards on all modules. No change of an attribute is noticed, nor one of a parameter's shape."""
    return _Whole("skip_nn_modules()", torch.compiler.skip_guard_on_all_nn_modules_unsafe)


def keep_tensors(keep_parameters: bool = False) -> Filter:
    """Drop all but the guards on tensors, also those on grad mode and on what dynamic shapes have in common."""
    decide = functools.partial(torch.compiler.keep_tensor_guards_unsafe, keep_parameters=keep_parameters)
    return _Whole("keep_tensors(keep_parameters=True)" if keep_parameters else "keep_tensors()", decide)


def skip_globals() -> Filter:
    """Drop guards on global variables. A global that changes keeps its old value in the compiled function."""
    return _Whole("skip_globals()", torch.compiler.skip_guard_on_globals_unsafe)


def skip_all() -> Filter:
    """Drop every guard. What was compiled first runs for every later call; for benchmarks."""
    return _Whole("skip_all()", torch.compiler.skip_all_guards_unsafe)


def keep_portable() -> Filter:
    """Keep guards that have a meaning outside of Python: tensors that are no globals, shapes, and global state."""
    return _Whole("keep_portable()", torch.compiler.keep_portable_guards_unsafe)


def keep_all() -> Filter:
    """Keep every guard: what torch does without a filter."""
    return _Each("keep_all()", lambda entry: True)


def aot_default() -> Filter:
    """Drop what ahead-of-time compilation drops without a filter: globals, and types that cannot be saved."""
    dropped = unserializable_guard_types()
    return _Each("aot_default()", lambda entry: not (entry.is_global or entry.guard_type in dropped))


def precompile_default() -> Filter:
    """Drop what Dynamo's setting `caching_precompile` drops, after any other filter: what holds for a process."""

    def keeps(entry: Entry) -> bool:
        within = any(type in _NOT_PRECOMPILED_WITHIN for type in entry.derived_guard_types)
        return not (within or entry.guard_type in _NOT_PRECOMPILED)

    return _Each("precompile_default()", keeps)


def _name_of(fn: Callable) -> str:
    return getattr(fn, "__name__", None) or repr(fn)


def _call(name: str, arguments: tuple[str, ...]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


def _check_some(name: str, what: str, given: tuple[str, ...]) -> None:
    if not given:
        raise FilterError(f"{name}: give at least one {what}.")
    for argument in given:
        if not isinstance(argument, str):
            raise FilterError(f"{name}: {one_line(argument)} is no text. Give each {what} as an argument of its own.")


def _check_known(name: str, what: str, given: tuple[str, ...], known: Iterable[str]) -> None:
    _check_some(name, what, given)
    unknown = [argument for argument in given if argument not in known]
    if known and unknown:
        raise FilterError(f"{name}: there is no {what} {unknown[0]!r}. Known are {', '.join(sorted(known))}.")


def _glob_to_regex(pattern: str) -> str:
    wild = {"*": ".*", "?": "."}
    return "".join(wild.get(character) or re.escape(character) for character in pattern)
