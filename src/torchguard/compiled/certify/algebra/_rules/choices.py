"""Rules of comparisons, choices, step functions, logic, and tests for infinity."""

from collections.abc import Callable
from typing import Any

import torch

from torchguard.compiled.certify.algebra._field import Kind, UnsupportedError
from torchguard.compiled.certify.algebra._values import Value, integers


def stepped(x: Value, function: Callable[[torch.Tensor], torch.Tensor]) -> Value:
    """A step function of real numbers with integer values: its derivative is zero."""
    steps = function(x.real_values()).to(torch.int64)
    x.field.trace.record_step(steps)
    return integers(x.field, steps)


def _step_function(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Value], Value]:
    return lambda x: x if x.is_integer else stepped(x, function).as_elements()


def _remainder(rounding: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Value]:
    """x - y * n, where the integer n is a quotient rounded: the derivative of n is zero."""

    def rule(x: Value, y: Any) -> Value:
        x = x if isinstance(x, Value) else y._other(x)
        divisor = x._other(y)
        if x.is_integer and divisor.is_integer:
            function = torch.remainder if rounding is torch.floor else torch.fmod
            return integers(x.field, function(x.element.to(torch.int64), divisor.element.to(torch.int64)))
        x, divisor = x.as_elements(), divisor.as_elements()
        quotient = stepped(x.without_tangent() / divisor.without_tangent(), rounding)
        return x - divisor * quotient.as_elements()

    return rule


def _logical(operation: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    def rule(*operands: Value) -> Value:
        if not all(isinstance(x, Value) and x.is_integer for x in operands):
            raise UnsupportedError("a logical operation on floats")
        return integers(operands[0].field, operation(*(x.element for x in operands)))

    return rule


def _maximum(a: Any, b: Any) -> Any:
    """The larger of two; where they are equal each has half the derivative, as in torch."""
    return a.eq(b).where((a + b) / 2, a.gt(b).where(a, b))


def _minimum(a: Any, b: Any) -> Any:
    """The smaller of two; where they are equal each has half the derivative, as in torch."""
    return a.eq(b).where((a + b) / 2, a.gt(b).where(b, a))


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    """A value limited to bounds; on a bound it has its own derivative, as in torch."""
    x = x if low is None else x.lt(low).where(low, x)
    return x if high is None else x.gt(high).where(high, x)


def _not_equal(a: Any, b: Any) -> Any:
    return a.eq(b).inverted()


def _is_kind(*kinds: Kind) -> Callable[[Value], Value]:
    """A test for infinity or NaN, or for none of them. See `PrimeField.kinds`."""

    def rule(x: Value) -> Value:
        if x.is_integer:
            return integers(x.field, torch.full(x.shape, Kind.FINITE in kinds))
        found = x.field.kinds(x.element)
        return integers(x.field, torch.isin(found, torch.tensor([*kinds], dtype=found.dtype)))

    return rule


FINITENESS_RULES: dict[str, Callable[[Value], Value]] = {
    "isfinite": _is_kind(Kind.FINITE),
    "isinf": _is_kind(Kind.POSITIVE_INFINITY, Kind.NEGATIVE_INFINITY),
    "isposinf": _is_kind(Kind.POSITIVE_INFINITY),
    "isneginf": _is_kind(Kind.NEGATIVE_INFINITY),
    "isnan": _is_kind(Kind.NAN),
}

RULES: dict[str, Callable[..., Any]] = {
    **FINITENESS_RULES,
    "floor": _step_function(torch.floor),
    "ceil": _step_function(torch.ceil),
    "round": _step_function(torch.round),
    "trunc": _step_function(torch.trunc),
    "remainder": _remainder(torch.floor),
    "fmod": _remainder(torch.trunc),
    "frac": lambda x: x - stepped(x, torch.trunc).as_elements(),
    "maximum": _maximum,
    "minimum": _minimum,
    "clamp": _clamp,
    "clamp_min": lambda x, low: _clamp(x, low),
    "clamp_max": lambda x, high: _clamp(x, None, high),
    "where": lambda condition, yes, no: condition.where(yes, no),
    "masked_fill": lambda x, mask, value: mask.where(value, x),
    "gt": lambda a, b: a.gt(b),
    "lt": lambda a, b: a.lt(b),
    "ge": lambda a, b: a.ge(b),
    "le": lambda a, b: a.le(b),
    "eq": lambda a, b: a.eq(b),
    "ne": _not_equal,
    "logical_and": _logical(torch.logical_and),
    "logical_or": _logical(torch.logical_or),
    "logical_xor": _logical(torch.logical_xor),
    "logical_not": _logical(torch.logical_not),
    "bitwise_and": _logical(torch.bitwise_and),
    "bitwise_or": _logical(torch.bitwise_or),
    "bitwise_xor": _logical(torch.bitwise_xor),
    "bitwise_not": _logical(torch.bitwise_not),
}
