"""The symbols of a graph that Dynamo traces, and other numbers that may stand for them.

Dynamo traces with one number for each symbol, its hint, and reuses the graph for every number that its guards allow.
What is found with the hints alone may hold for them alone: `h.roll(4, 0)` keeps the samples of a batch of 4 apart, and
no other's. So `Symbols.others` gives numbers to try. They are different primes where the guards allow it, so that none
is by chance a multiple or a divisor of another, or of a constant of the program.

All of it is required and the same in torch 2.11 to 2.15.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

# A number of a graph: the concrete one, or a symbol's.
Numbers: TypeAlias = Callable[[Any], Any]

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_SMALL = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109)
_MEDIUM = (113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197, 199, 211, 223, 227, 229)
_LARGE = (67, 131, 257)


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
        """Numbers to try: twice another for each symbol, the second time more samples.

        Raises:
            CannotRunError: the guards leave no other number that was tried.

        Args:
            batch: the number of samples, if it varies.
        """
        varies = [number for number in batch if isinstance(number, torch.SymInt)]
        of_batch = {symbol for number in varies for symbol in number.node.expr.free_symbols}
        guards = self._guards()
        yield self._numbers(dict.fromkeys(self._hints, _SMALL), guards)
        yield self._numbers(
            {
                symbol: _LARGE if symbol in of_batch else _SMALL[4:] if symbol in self._sizes else _MEDIUM
                for symbol in self._hints
            },
            guards,
        )

    def _add(self, number: Any, is_size: bool) -> None:
        expression = number.node.expr
        if is_size:
            self._sizes |= expression.free_symbols
        if expression.is_symbol and number.node.has_hint():
            self._hints[expression], self._environment = number.node.hint, number.node.shape_env

    def _guards(self) -> list[Any]:
        """What holds for the symbols."""
        environment = self._environment
        asserted = itertools.chain.from_iterable(environment.deferred_runtime_asserts.values())
        found = [environment.replace(one.expr) for one in (*environment.guards, *asserted)]
        return [one for one in found if one.free_symbols]

    def _numbers(self, first: dict[Any, Sequence[int]], guards: list[Any]) -> Numbers:
        chosen: dict[Any, Any] = dict(self._hints)
        for symbol, hint in self._hints.items():
            taken = {*chosen.values()}
            for number in _candidates(hint, first[symbol]):
                if number not in taken and self._allowed(symbol, chosen | {symbol: number}, guards):
                    chosen[symbol] = number
                    break
            else:
                raise CannotRunError(f"no other number than {hint} was found that a size of the graph may have")
        return lambda value: _value(value, chosen)

    def _allowed(self, symbol: Any, chosen: dict[Any, Any], guards: list[Any]) -> bool:
        bounds = self._environment.var_to_range.get(symbol)
        if bounds is not None and not bounds.lower <= chosen[symbol] <= bounds.upper:
            return False
        of_symbol = [guard for guard in guards if symbol in guard.free_symbols]
        return all(_with_numbers(guard, chosen) != False for guard in of_symbol)  # noqa: E712  (sympy's)


def _candidates(hint: int | float, first: Sequence[int]) -> list[int] | list[float]:
    """Numbers to try, the best first: a multiple of the hint shows less than a prime, but more guards allow it."""
    if isinstance(hint, float):  # one below 1 may be a probability
        return [hint * n / 16 for n in (11, 7, 13, 5)] if 0 < hint < 1 else [hint + n for n in first]
    primes = [one for one in (*first, *_SMALL) if hint < 2 or one % hint]
    return [*primes, *(hint * n for n in (3, 5, 7, 2)), *(hint + n for n in range(1, 65)), hint - 1, hint - 2]


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
