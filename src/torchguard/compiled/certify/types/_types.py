"""Types: a shape and a dtype; how operands broadcast and promote to one; and the rules of pointwise operators.

Promotion and broadcasting follow torch's documentation, and call nothing of torch's.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from torchguard._graphs.op_facts import FACTS, OpFacts


class IllTypedError(Exception):
    """The arguments of an operator have incompatible types: the claim fails. It never reaches a user."""


class UnsupportedTypeError(Exception):
    """An operator, or this way to call it, has no rule: the claim is inconclusive. It never reaches a user."""


@dataclass(frozen=True)
class Type:
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


Operand: TypeAlias = Type | bool | int | float

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


_REAL_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}


def real(x: Type) -> Type:
    """The real type behind a complex one: that of an absolute value or a variance."""
    return Type(x.shape, _REAL_PARTS.get(x.dtype, x.dtype))


def require(holds: bool, message: str) -> None:
    """Raise an `IllTypedError` unless a condition holds."""
    if not holds:
        raise IllTypedError(message)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that operands of these shapes broadcast to."""
    rank = max((len(shape) for shape in shapes), default=0)
    result = []
    for dim in range(-rank, 0):
        sizes = {shape[dim] for shape in shapes if len(shape) >= -dim} - {1}
        require(len(sizes) <= 1, f"the shapes {', '.join(str(list(s)) for s in shapes)} do not broadcast")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def category(dtype: torch.dtype) -> int:
    """0 for booleans, 1 for integers, 2 for floats."""
    if dtype == torch.bool:
        return 0
    if dtype in _INTEGERS:
        return 1
    if dtype in _FLOATS:
        return 2
    raise UnsupportedTypeError(f"the dtype {dtype}")


def join(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The dtype that two dtypes of tensors with dimensions promote to."""
    if a == b:
        return a
    if category(a) != category(b):
        return a if category(a) > category(b) else b
    if {a, b} == {torch.float16, torch.bfloat16}:
        return torch.float32
    if {a, b} == {torch.uint8, torch.int8}:
        return torch.int16
    order = _FLOATS if category(a) == 2 else _INTEGERS
    return max(a, b, key=order.index)


def number_dtype(number: bool | int | float) -> torch.dtype:
    """The dtype of a Python number."""
    if isinstance(number, complex):
        raise UnsupportedTypeError(f"the complex number {number}")
    if isinstance(number, bool):
        return torch.bool
    return torch.int64 if isinstance(number, int) else torch.get_default_dtype()


def promoted(*operands: Operand) -> torch.dtype:
    """The dtype that operands promote to: scalar tensors and numbers count only if they are of a higher category."""
    tensors = [x for x in operands if isinstance(x, Type)]
    groups: list[Iterable[torch.dtype]] = [
        [x.dtype for x in tensors if x.shape],
        [x.dtype for x in tensors if not x.shape],
        [number_dtype(x) for x in operands if not isinstance(x, Type)],
    ]
    result: torch.dtype | None = None
    for group in groups:
        dtype = _joined(group)
        if dtype is None:
            continue
        if result is None:
            result = dtype
        elif category(result) < 2 and (category(result) == 0 or category(dtype) == 2):
            result = join(result, dtype)
    if result is None:
        raise UnsupportedTypeError("no operand")
    return result


def _joined(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    result: torch.dtype | None = None
    for dtype in dtypes:
        result = dtype if result is None else join(result, dtype)
    return result


def shape_of(x: Operand) -> tuple[int, ...]:
    return x.shape if isinstance(x, Type) else ()


def floating(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a result that is always floating-point."""
    return dtype if category(dtype) == 2 else torch.get_default_dtype()


def wrapped(dim: int, rank: int) -> int:
    """A dimension, counted from the front."""
    require(-max(rank, 1) <= dim < max(rank, 1), f"dimension {dim} of a tensor with {rank} dimensions")
    return dim % max(rank, 1)


def dims_of(x: Type, dim: int | Sequence[int] | None) -> list[int]:
    """The dimensions that an argument names, counted from the front; None and an empty list name all."""
    chosen = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if not x.rank or not chosen:
        return list(range(x.rank))
    return [wrapped(d, x.rank) for d in chosen]


def _pointwise(facts: OpFacts) -> Callable[..., Type]:
    """The rule of a pointwise operator: it broadcasts its operands, and promotes them to the dtype of its result."""

    def rule(*args: Operand, **options: Any) -> Type:
        operands = args[: facts.pointwise]
        shape = broadcast(*map(shape_of, operands))
        if facts.result == "bool":
            return Type(shape, torch.bool)
        dtype = promoted(*operands)
        is_floating = facts.result == "float" and options.get("rounding_mode") is None
        return Type(shape, floating(dtype) if is_floating else dtype)

    return rule


def same_as(position: int) -> Callable[..., Type]:
    """The rule of an operator whose result has the type of one of its arguments."""

    def rule(*args: Any, **_: Any) -> Type:
        if len(args) <= position or not isinstance(args[position], Type):
            raise UnsupportedTypeError(f"an argument {position} that is not a tensor")
        return args[position]

    return rule


def _bitwise(*operands: Operand) -> Type:
    dtype = promoted(*operands)
    require(not dtype.is_floating_point, f"a bitwise operation on {dtype}")
    return Type(broadcast(*map(shape_of, operands)), dtype)


def _where(condition: Type, yes: Operand, no: Operand) -> Type:
    require(condition.dtype == torch.bool, f"a condition of {condition.dtype}")
    return Type(broadcast(condition.shape, shape_of(yes), shape_of(no)), promoted(yes, no))


def _masked_fill(x: Type, mask: Type, value: Operand) -> Type:
    require(mask.dtype == torch.bool, f"a mask of {mask.dtype}")
    return Type(broadcast(x.shape, mask.shape), x.dtype)


def _clamp(x: Type, low: Operand | None = None, high: Operand | None = None) -> Type:
    operands = [v for v in (x, low, high) if isinstance(v, Type | bool | int | float)]
    return Type(broadcast(*map(shape_of, operands)), promoted(*operands))


_SAME_AS = {
    1: ["gelu_backward", "silu_backward", "mish_backward", "softplus_backward", "hardtanh_backward"]
    + ["hardsigmoid_backward", "hardswish_backward", "softshrink_backward", "hardshrink_backward"]
    + ["leaky_relu_backward", "log_sigmoid_backward"],
    5: ["elu_backward"],
}

RULES: dict[str, Callable[..., Any]] = {
    **{name: _pointwise(facts) for name, facts in FACTS.items() if facts.pointwise},
    **{name: same_as(position) for position, names in _SAME_AS.items() for name in names},
    **dict.fromkeys(("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"), _bitwise),
    "abs": real,
    "where": _where,
    "masked_fill": _masked_fill,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": lambda x, bound: _clamp(x, None, bound),
    "polygamma": lambda n, x: RULES["digamma"](x),
    "log_sigmoid_forward": lambda x: (x, x),
    "_prelu_kernel_backward": lambda g, x, weight: (x, Type(broadcast(x.shape, weight.shape), x.dtype)),
}
