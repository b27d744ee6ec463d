"""The symbols of a graph that Dynamo traces, and other numbers that may stand for them.

Dynamo traces with one number for each symbol, its hint, and reuses the graph for every number that its guards allow.
What is found with the hints alone may hold for them alone: `h.roll(4, 0)` keeps the samples of a batch of 4 apart, and
no other's. So `Symbols.others` gives numbers to try. They are different primes where the guards allow it, so that none
is by chance a multiple or a divisor of another, or of a constant of the program.

All of it is required and the same in torch 2.11 to 2.15.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

# A number of a graph: the concrete one, or a symbol's.
Numbers: TypeAlias = Callable[[Any], Any]

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)


class CannotRunError(Exception):
    """A graph cannot be run on fake tensors; the message says why."""


class Symbols:
    """The symbols of a graph and those that it calls: sizes, numbers among the arguments, and what `item` returns."""

    def __init__(self, graphs: Iterable[fx.Graph]) -> None:
        self._hints: dict[Any, int | float] = {}
        self._sizes: set[Any] = set()
        self._environment: Any = None
        for node in itertools.chain.from_iterable(graph.nodes for graph in graphs):
            if node.op == "placeholder" or is_item(node):
                value = node.meta.get("example_value")
                sizes = [*value.shape, *value.stride()] if _has_sizes(value) else []
                for number in (one for one in (value, *sizes) if isinstance(one, _SYMBOLIC[:2])):
                    self._add(number, value is not number)

    def __bool__(self) -> bool:
        return bool(self._hints)

    @property
    def have_sizes(self) -> bool:
        """Whether a size of a tensor is among them."""
        return bool(self._sizes)

    def others(self, batch: Sequence[Any]) -> Iterator[Numbers]:
        """Numbers to try: twice another for each symbol, the second time larger ones, about 67 samples for example.

        Raises:
            CannotRunError: no number was found that the guards allow.

        Args:
            batch: the number of samples, if it varies.
        """
        varies = [number for number in batch if isinstance(number, torch.SymInt)]
        of_batch = {symbol for number in varies for symbol in number.node.expr.free_symbols}
        kinds = {one: 0 if one in of_batch else 1 if one in self._sizes else 2 for one in self._hints}
        before = self._hints
        for about in ((5, 5, 23), (67, 37, 61)):
            aims = {one: about[kinds[one]] for one in sorted(kinds, key=lambda one: kinds[one])}
            before = self._choice(aims, before, of_batch)
            yield functools.partial(_value, chosen=before)

    def _add(self, number: Any, is_size: bool) -> None:
        expression = number.node.expr
        if is_size:
            self._sizes |= expression.free_symbols
        if expression.is_symbol and number.node.has_hint():
            self._hints[expression], self._environment = number.node.hint, number.node.shape_env

    def _choice(self, aims: dict[Any, int], before: dict[Any, Any], of_batch: set[Any]) -> dict[Any, Any]:
        """Numbers that differ from the hints and, where that is possible, from those before and from each other.

        Args:
            aims: about what each symbol should be, in the order in which they are chosen.
        """
        guards = self._guards()
        follows = _solved(guards, of_batch)
        chosen = dict(self._hints)
        waiting = [symbol for symbol in aims if symbol not in follows]
        while waiting:  # what cannot change beside the hints of others may, once they have changed
            left = []
            for symbol in waiting:
                candidates = _candidates(self._hints[symbol], aims[symbol])
                taken = {before[symbol], *chosen.values()}
                fresh = [one for one in candidates if isinstance(one, float) or one not in taken]
                tried = (_with(chosen, symbol, number, follows) for number in (*fresh, *candidates))
                found = next((one for one in tried if self._allowed(one, guards)), None)
                if found is None:
                    left.append(symbol)
                else:
                    chosen = found
            if len(left) == len(waiting):
                hints = ", ".join(str(self._hints[one]) for one in left)
                raise CannotRunError(f"no other sizes or numbers than {hints} were found that the graph allows")
            waiting = left
        return chosen

    def _guards(self) -> list[Any]:
        """What holds for the symbols."""
        environment = self._environment
        asserted = itertools.chain.from_iterable(environment.deferred_runtime_asserts.values())
        found = [environment.replace(one.expr) for one in (*environment.guards, *asserted)]
        return [one for one in found if one.free_symbols]

    def _allowed(self, chosen: dict[Any, Any], guards: list[Any]) -> bool:
        changed = {symbol for symbol, number in chosen.items() if number != self._hints.get(symbol)}
        for symbol in changed:
            bounds = self._environment.var_to_range.get(symbol)
            if bounds is not None and not bounds.lower <= chosen[symbol] <= bounds.upper:
                return False
        of_changed = (guard for guard in guards if not changed.isdisjoint(guard.free_symbols))
        return all(_with_numbers(guard, chosen) != False for guard in of_changed)  # noqa: E712  (sympy's)


def _solved(guards: Sequence[Any], of_batch: set[Any]) -> dict[Any, Any]:
    """Symbols that a guard says to be equal to an expression of others."""
    found: dict[Any, Any] = {}
    for guard in guards:
        sides = guard.args if type(guard).__name__ == "Equality" else ()
        for one, other in itertools.permutations(sides, 2):
            free = other.free_symbols
            used = {*found}.union(*(expression.free_symbols for expression in found.values()))
            if one.is_symbol and one not in used | of_batch and free and free.isdisjoint({one, *found}):
                found[one] = other
                break
    return found


def _with(chosen: dict[Any, Any], symbol: Any, number: Any, follows: dict[Any, Any]) -> dict[Any, Any]:
    new = chosen | {symbol: number}
    return new | {one: int(_with_numbers(expression, new)) for one, expression in follows.items()}


def _candidates(hint: int | float, about: int) -> list[Any]:
    """Numbers to try, the best first: a multiple of the hint shows less than a prime, but more guards allow it."""
    if isinstance(hint, float):  # one below 1 may be a probability
        parts = [hint * n / 16 for n in (11, 7, 13, 5)]
        return [*parts, hint + 1] if 0 < hint < 1 else [*(hint + prime for prime in _PRIMES), *parts]
    primes = sorted((one for one in _PRIMES if hint < 2 or one % hint), key=lambda one: (one < about, abs(one - about)))
    others = [[hint * n for n in range(2, max(4, 68 // max(hint, 1)))], [hint + n for n in (*range(1, 65), -1, -2)]]
    near = [number for part in others for number in sorted(part, key=lambda one: abs(one - about))]
    return [number for number in (*primes, *near) if number != hint]


def is_item(node: fx.Node) -> bool:
    """Whether a node makes a number of a tensor. Dynamo passes numbers that may change as tensors."""
    return node.op == "call_method" and node.target == "item"


def hints(value: Any) -> Any:
    """The number that a symbol was traced with.

    Raises:
        CannotRunError: there is none, as it depends on values.
    """
    if not isinstance(value, _SYMBOLIC):
        return value
    if not value.node.has_hint():
        raise CannotRunError("what the model does depends on values")
    return value.node.hint


def _value(value: Any, chosen: dict[Any, Any]) -> Any:
    """The number that an expression of symbols has with these."""
    if not isinstance(value, _SYMBOLIC):
        return value
    found = _with_numbers(value.node.expr, chosen)
    if found.free_symbols:
        raise CannotRunError("what the model does depends on values")
    return value.node.pytype(found)


def _with_numbers(expression: Any, chosen: dict[Any, Any]) -> Any:
    import sympy  # here, because loading it takes long

    return expression.xreplace({symbol: sympy.sympify(value) for symbol, value in chosen.items()})


def _has_sizes(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
