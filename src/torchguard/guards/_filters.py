"""Filters: which guards a compiled function keeps. They combine, have a `repr` that is code, and explain themselves.

A filter is a function that `torch.compile(options={"guard_filter_fn": ...})` takes. The compiled function no longer
notices a change that only dropped guards check for.
"""

import abc
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torchguard._torch import guards as torch_guards
from torchguard.exceptions import FilterError
from torchguard.guards._explain import Explanation, FilterEntry, describe, short_repr

SOURCE_KINDS = ("global", "local", "module", "closure", "state")

# What torch drops under `caching_precompile`. Torch has this list inside a function, where it cannot be imported.
_NOT_PRECOMPILED = ("ID_MATCH", "CLOSURE_MATCH", "WEAKREF_ALIVE", "DICT_VERSION")
_NOT_PRECOMPILED_DERIVED = ("ID_MATCH", "DICT_VERSION")

FilterFunction = Callable[[Sequence[FilterEntry]], Sequence[bool]]


class Filter(abc.ABC):
    """Decides which guards to keep. `a & b` keeps what both keep, `a | b` what either keeps, `~a` what `a` drops.

    As with `and` and `or`, the right side decides only on guards that the left side leaves undecided.

    >>> ~of_type("ID_MATCH") & ~from_source("global")
    ~of_type('ID_MATCH') & ~from_source('global')
    """

    def __call__(self, entries: Sequence[FilterEntry]) -> list[bool]:
        """True for each guard to keep."""
        entries = list(entries)
        return self._decide(entries, [True] * len(entries))

    @abc.abstractmethod
    def _decide(self, entries: list[FilterEntry], candidates: list[bool]) -> list[bool]:
        """True for each candidate to keep. The other guards are decided already, and False in the result."""

    def explain(self, entries: Sequence[FilterEntry]) -> Explanation:
        """Which of these guards it keeps and which it drops, as readable text. `guards.entries` lists a call's."""
        entries = list(entries)
        guards = [(describe(entry), keep) for entry, keep in zip(entries, self(entries), strict=True)]
        return Explanation(
            repr(self),
            kept=tuple(guard for guard, keep in guards if keep),
            dropped=tuple(guard for guard, keep in guards if not keep),
        )

    def __and__(self, other: "Filter") -> "Filter":
        return _And(self, other) if isinstance(other, Filter) else NotImplemented

    def __or__(self, other: "Filter") -> "Filter":
        return _Or(self, other) if isinstance(other, Filter) else NotImplemented

    def __invert__(self) -> "Filter":
        return _Not(self)


class _And(Filter):
    def __init__(self, left: Filter, right: Filter) -> None:
        self.left, self.right = left, right

    def _decide(self, entries: list[FilterEntry], candidates: list[bool]) -> list[bool]:
        return self.right._decide(entries, self.left._decide(entries, candidates))

    def __repr__(self) -> str:
        sides = (self.left, self.right)
        return " & ".join(f"({side!r})" if isinstance(side, _Or) else repr(side) for side in sides)


class _Or(Filter):
    def __init__(self, left: Filter, right: Filter) -> None:
        self.left, self.right = left, right

    def _decide(self, entries: list[FilterEntry], candidates: list[bool]) -> list[bool]:
        left = self.left._decide(entries, candidates)
        right = self.right._decide(entries, _except(candidates, left))
        return [one or other for one, other in zip(left, right, strict=True)]

    def __repr__(self) -> str:
        return f"{self.left!r} | {self.right!r}"


class _Not(Filter):
    def __init__(self, inner: Filter) -> None:
        self.inner = inner

    def _decide(self, entries: list[FilterEntry], candidates: list[bool]) -> list[bool]:
        return _except(candidates, self.inner._decide(entries, candidates))

    def __repr__(self) -> str:
        return f"~({self.inner!r})" if isinstance(self.inner, _And | _Or) else f"~{self.inner!r}"


class _PerGuard(Filter):
    """Decides on each guard by itself. `made_by` is the function that made it, with arguments: it is pickled so."""

    def __init__(self, text: str, keeps: Callable[[FilterEntry], bool], *made_by: Any) -> None:
        self.text, self.keeps, self.made_by = text, keeps, made_by

    def __reduce__(self) -> tuple[Any, ...]:
        return self.made_by[0], self.made_by[1:]

    def _decide(self, entries: list[FilterEntry], candidates: list[bool]) -> list[bool]:
        return [
            is_candidate and self._decide_one(entry) for entry, is_candidate in zip(entries, candidates, strict=True)
        ]

    def _decide_one(self, entry: FilterEntry) -> bool:
        try:
            answer = self.keeps(entry)
        except Exception as error:
            raise _filter_error(self, error, _label(entry)) from error
        return _exact_bool(self, answer, entry)

    def __repr__(self) -> str:
        return self.text


class _AllGuards(Filter):
    """Decides by a function in torch's form. It may depend on all guards at once, so it is always given all."""

    def __init__(self, text: str, decide: FilterFunction) -> None:
        self.text, self.decide = text, decide

    def _decide(self, entries: list[FilterEntry], candidates: list[bool]) -> list[bool]:
        try:
            answers = self.decide(list(entries))
        except FilterError:
            raise
        except Exception as error:
            raise _filter_error(self, error, self._where(entries)) from error
        if not isinstance(answers, Sequence):
            raise FilterError(f"{self!r} returned {type(answers).__name__}. Return a list with one bool per guard.")
        if len(answers) != len(entries):
            raise FilterError(
                f"{self!r} returned {len(answers)} bools for {len(entries)} guards{_first_missing(answers, entries)}. "
                "Return one bool per guard, in their order."
            )
        kept = [_exact_bool(self, answer, entry) for answer, entry in zip(answers, entries, strict=True)]
        return [keep and is_candidate for keep, is_candidate in zip(kept, candidates, strict=True)]

    def _where(self, entries: list[FilterEntry]) -> str:
        """The guard it raises for, found by calling it again with one guard at a time."""
        for entry in entries:
            try:
                self.decide([entry])
            except Exception:
                return _label(entry)
        return f"all {len(entries)} guards together"

    def __repr__(self) -> str:
        return self.text


def _except(candidates: list[bool], kept: list[bool]) -> list[bool]:
    return [is_candidate and not keep for is_candidate, keep in zip(candidates, kept, strict=True)]


def _label(entry: FilterEntry) -> str:
    return f"guard {entry.name or 'without a name'} ({entry.guard_type})"


def _filter_error(filter: Filter, error: Exception, where: str) -> FilterError:
    return FilterError(f"{filter!r} raised {type(error).__name__} at {where}: {error}")


def _exact_bool(filter: Filter, answer: object, entry: FilterEntry) -> bool:
    if answer is True or answer is False:
        return answer
    raise FilterError(
        f"{filter!r} returned {short_repr(answer)} ({type(answer).__name__}) for {_label(entry)}. "
        "Return exactly True to keep the guard or False to drop it."
    )


def _first_missing(answers: Sequence[object], entries: Sequence[FilterEntry]) -> str:
    return f": the first without one is {_label(entries[len(answers)])}" if len(answers) < len(entries) else ""


# Building blocks: each keeps the guards it names, and drops the rest.


def of_type(*types: str) -> Filter:
    """Keep guards of these types, such as "TENSOR_MATCH"."""
    _check_known("of_type", "guard type", types, torch_guards.guard_types())
    return _PerGuard(_repr_of_call("of_type", types), lambda entry: entry.guard_type in types, of_type, *types)


def of_derived_type(*types: str) -> Filter:
    """Keep guards that Dynamo implements by one of these types: a "CONSTANT_MATCH" of None by a "NONE_MATCH"."""
    _check_known("of_derived_type", "guard type", types, torch_guards.guard_types())
    wanted = frozenset(types)
    return _PerGuard(
        _repr_of_call("of_derived_type", types),
        lambda entry: not wanted.isdisjoint(entry.derived_guard_types),
        of_derived_type,
        *types,
    )


def named(*patterns: str) -> Filter:
    """Keep guards whose whole name matches one of these, where `*` matches any text and `?` one character.

    Names are Python expressions, with arguments by their name and globals in `G`: `x`, `self._modules['fc'].training`,
    `G['LIMIT']`. Brackets are literal. Guards on the state of torch have an empty name.
    """
    _check_some("named", "pattern", patterns)
    matches = [re.compile(_glob_to_regex(pattern), re.DOTALL).fullmatch for pattern in patterns]
    return _PerGuard(
        _repr_of_call("named", patterns),
        lambda entry: any(match(entry.name) is not None for match in matches),
        named,
        *patterns,
    )


def from_source(*kinds: str) -> Filter:
    """Keep guards on values that are reached from one of these.

    "global": a global variable. "local": an argument. "closure": a variable of an enclosing function.
    "module": an `nn.Module` and its attributes. "state": no variable, such as grad mode and relations between shapes.
    A guard on an attribute of a global module is both "global" and "module".
    """
    _check_known("from_source", "kind of source", kinds, SOURCE_KINDS)
    return _PerGuard(
        _repr_of_call("from_source", kinds),
        lambda entry: any(kind in kinds for kind in torch_guards.guard_sources(entry.orig_guard)),
        from_source,
        *kinds,
    )


def with_value(predicate: Callable[[Any], bool], text: str | None = None) -> Filter:
    """Keep guards on a value for which `predicate` is True. Those without a value are dropped.

    Args:
        text: the predicate in the filter's `repr`; by default its name.

    >>> named("y") & with_value(lambda value: value is None, "lambda value: value is None")
    named('y') & with_value(lambda value: value is None)
    """
    return _PerGuard(
        f"with_value({text or _name_of(predicate)})",
        lambda entry: predicate(entry.value) if entry.has_value else False,
        with_value,
        predicate,
        text,
    )


def by_function(fn: FilterFunction, name: str | None = None) -> Filter:
    """Keep what a function in torch's form keeps: it takes the list of guards and returns a list of bools.

    Args:
        name: the function in the filter's `repr`; by default its name.

    >>> by_function(torch.compiler.skip_guard_on_globals_unsafe) & of_type("TENSOR_MATCH")
    by_function(skip_guard_on_globals_unsafe) & of_type('TENSOR_MATCH')
    """
    if not callable(fn):
        raise FilterError(
            f"{short_repr(fn)} ({type(fn).__name__}) is no filter: it is not callable. Give a function of the guards."
        )
    return _AllGuards(f"by_function({name or _name_of(fn)})", fn)


# Predefined filters. The first six call torch's own helpers, and so decide as the installed version does.


def skip_inbuilt_nn_modules() -> Filter:
    """Drop guards on torch's own modules. The compiled function does not notice Dropout's `.eval()`."""
    return _AllGuards("skip_inbuilt_nn_modules()", torch.compiler.skip_guard_on_inbuilt_nn_modules_unsafe)


def skip_nn_modules() -> Filter:
    """Drop guards on all modules. The compiled function notices no change of an attribute or a parameter's shape."""
    return _AllGuards("skip_nn_modules()", torch.compiler.skip_guard_on_all_nn_modules_unsafe)


def keep_tensors(keep_parameters: bool = False) -> Filter:
    """Drop all guards but those on tensors, including those on grad mode and on relations between dynamic shapes."""
    decide = functools.partial(torch.compiler.keep_tensor_guards_unsafe, keep_parameters=keep_parameters)
    return _AllGuards("keep_tensors(keep_parameters=True)" if keep_parameters else "keep_tensors()", decide)


def skip_globals() -> Filter:
    """Drop guards on global variables. The compiled function keeps the value a global had when it was compiled."""
    return _AllGuards("skip_globals()", torch.compiler.skip_guard_on_globals_unsafe)


def skip_all() -> Filter:
    """Drop every guard. The first compiled graph runs for every later call; for benchmarks."""
    return _AllGuards("skip_all()", torch.compiler.skip_all_guards_unsafe)


def keep_portable() -> Filter:
    """Keep guards that make sense outside Python: on tensors that are no globals, on shapes, and on global state."""
    return _AllGuards("keep_portable()", torch.compiler.keep_portable_guards_unsafe)


def keep_all() -> Filter:
    """Keep every guard, as torch does without a filter."""
    return _PerGuard("keep_all()", lambda entry: True, keep_all)


def aot_default() -> Filter:
    """Drop what ahead-of-time compilation drops by default: guards on globals, and types that cannot be serialized."""
    dropped = torch_guards.unserializable_guard_types()
    return _PerGuard("aot_default()", lambda entry: not (entry.is_global or entry.guard_type in dropped), aot_default)


def precompile_default() -> Filter:
    """Drop what Dynamo drops under `caching_precompile`, after any filter: guards that hold in one process only."""

    def keeps(entry: FilterEntry) -> bool:
        is_derived = any(type in _NOT_PRECOMPILED_DERIVED for type in entry.derived_guard_types)
        return not (is_derived or entry.guard_type in _NOT_PRECOMPILED)

    return _PerGuard("precompile_default()", keeps, precompile_default)


def _name_of(fn: Callable) -> str:
    return getattr(fn, "__name__", None) or repr(fn)


def _repr_of_call(name: str, arguments: tuple[str, ...]) -> str:
    return f"{name}({', '.join(map(repr, arguments))})"


def _check_some(name: str, what: str, given: tuple[str, ...]) -> None:
    if not given:
        raise FilterError(f"{name}: give at least one {what}.")
    for argument in given:
        if not isinstance(argument, str):
            raise FilterError(
                f"{name}: {short_repr(argument)} is not a string. Give each {what} as an argument of its own."
            )


def _check_known(name: str, what: str, given: tuple[str, ...], known: Iterable[str]) -> None:
    _check_some(name, what, given)
    unknown = [argument for argument in given if argument not in known]
    if known and unknown:
        raise FilterError(f"{name}: there is no {what} {unknown[0]!r}. Known are {', '.join(sorted(known))}.")


def _glob_to_regex(pattern: str) -> str:
    wildcards = {"*": ".*", "?": "."}
    return "".join(wildcards.get(character) or re.escape(character) for character in pattern)
