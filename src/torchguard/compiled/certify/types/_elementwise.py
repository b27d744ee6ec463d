"""Types of what is computed element by element, and of what only looks like its argument."""

from collections.abc import Callable
from typing import Any

import torch

from torchguard.compiled.certify.types._types import (
    Operand,
    Type,
    UncoveredError,
    broadcast,
    floating,
    promoted,
    real,
    require,
    shape_of,
)


def _operands(values: Any) -> list[Operand]:
    return [v for v in values if isinstance(v, Type | bool | int | float)]


def _pointwise(count: int) -> Callable[..., Type]:
    def rule(*operands: Operand, **_: Any) -> Type:
        own = operands[:count]
        return Type(broadcast(*map(shape_of, own)), promoted(*own))

    return rule


def _floating(count: int) -> Callable[..., Type]:
    def rule(*operands: Operand, **options: Any) -> Type:
        if options.get("rounding_mode") is not None:
            return Type(broadcast(*map(shape_of, operands[:count])), promoted(*operands[:count]))
        own = operands[:count]
        return Type(broadcast(*map(shape_of, own)), floating(promoted(*own)))

    return rule


def _boolean(count: int) -> Callable[..., Type]:
    return lambda *operands: Type(broadcast(*map(shape_of, operands[:count])), torch.bool)


def _logical_bits(*operands: Operand) -> Type:
    dtype = promoted(*operands)
    require(not dtype.is_floating_point, f"bits of {dtype}")
    return Type(broadcast(*map(shape_of, operands)), dtype)


def _where(condition: Type, yes: Operand, no: Operand) -> Type:
    require(condition.dtype == torch.bool, f"a condition of {condition.dtype}")
    return Type(broadcast(condition.shape, shape_of(yes), shape_of(no)), promoted(yes, no))


def _masked_fill(x: Type, mask: Type, value: Operand) -> Type:
    require(mask.dtype == torch.bool, f"a mask of {mask.dtype}")
    return Type(broadcast(x.shape, mask.shape), x.dtype)


def _clamp(x: Type, low: Operand | None = None, high: Operand | None = None) -> Type:
    own = _operands([x, low, high])
    return Type(broadcast(*map(shape_of, own)), promoted(*own))


def _clamp_bound(x: Type, bound: Operand) -> Type:
    return _clamp(x, bound)


def same_as(place: int) -> Callable[..., Type]:
    """The type of one of the arguments."""

    def rule(*args: Any, **_: Any) -> Type:
        if len(args) <= place or not isinstance(args[place], Type):
            raise UncoveredError(f"argument {place} that is no tensor")
        return args[place]

    return rule


def _twice(x: Type) -> tuple[Type, Type]:
    return x, x


_POINTWISE = {
    1: ["neg", "sgn", "sign", "square", "relu", "floor", "ceil", "round", "trunc"],
    2: ["add", "sub", "rsub", "mul", "maximum", "minimum", "pow", "atan2", "logaddexp", "threshold_backward"],
    3: ["lerp", "addcmul", "addcdiv"],
}
_FLOATING = {
    1: ["exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tan"]
    + ["asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "sigmoid", "erf", "erfc", "erfinv"]
    + ["lgamma", "digamma"],
    2: ["div", "tanh_backward", "sigmoid_backward"],
}
_SAME_AS = {
    0: ["threshold", "leaky_relu", "elu", "celu", "silu", "mish", "softplus", "hardtanh", "hardsigmoid", "hardswish"]
    + ["softshrink", "hardshrink", "gelu", "fill", "_prelu_kernel", "clone", "alias", "contiguous", "lift_fresh"]
    + ["detach", "flip", "roll", "tril", "triu", "copy"],
    1: ["gelu_backward", "silu_backward", "mish_backward", "softplus_backward", "hardtanh_backward"]
    + ["hardsigmoid_backward", "hardswish_backward", "softshrink_backward", "hardshrink_backward"]
    + ["leaky_relu_backward", "log_sigmoid_backward"],
    5: ["elu_backward"],
}

RULES: dict[str, Callable[..., Any]] = {
    **{name: _pointwise(count) for count, names in _POINTWISE.items() for name in names},
    **{name: _floating(count) for count, names in _FLOATING.items() for name in names},
    **{name: same_as(place) for place, names in _SAME_AS.items() for name in names},
    **{name: _boolean(2) for name in ("gt", "lt", "ge", "le", "eq", "ne", "logical_and", "logical_or", "logical_xor")},
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), _logical_bits),
    "logical_not": _boolean(1),
    "abs": real,
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamp,
    "clamp_min": _clamp_bound,
    "clamp_max": lambda x, bound: _clamp(x, None, bound),
    "log_sigmoid_forward": _twice,
    "_prelu_kernel_backward": lambda g, x, weight: (x, Type(broadcast(x.shape, weight.shape), x.dtype)),
}
