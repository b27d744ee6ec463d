"""What a tensor is to the type checker: a shape and a dtype; and how operands combine to one."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch


class IllTypedError(Exception):
    """The arguments of an operator do not fit together. It ends as a failed claim and never reaches a user."""


class UncoveredError(Exception):
    """There is no rule for an operator called like that. It ends as an inconclusive claim and never reaches a user."""


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
    """The type of what is real of a tensor: its size, its variance."""
    return Type(x.shape, _REAL_PARTS.get(x.dtype, x.dtype))


def require(is_fine: bool, message: str) -> None:
    """Raise unless something holds."""
    if not is_fine:
        raise IllTypedError(message)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that operands of these shapes have together."""
    rank = max((len(shape) for shape in shapes), default=0)
    result = []
    for place in range(-rank, 0):
        sizes = {shape[place] for shape in shapes if len(shape) >= -place} - {1}
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
    raise UncoveredError(f"the dtype {dtype}")


def join(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The dtype that holds both."""
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
    """The dtype a Python number counts as."""
    if isinstance(number, complex):
        raise UncoveredError(f"the complex number {number}")
    if isinstance(number, bool):
        return torch.bool
    return torch.int64 if isinstance(number, int) else torch.get_default_dtype()


def promoted(*operands: Operand) -> torch.dtype:
    """The dtype of a result: tensors of no dimension and numbers count only by being of a higher category."""
    tensors = [x for x in operands if isinstance(x, Type)]
    groups: list[Iterable[torch.dtype]] = [
        [x.dtype for x in tensors if x.shape],
        [x.dtype for x in tensors if not x.shape],
        [number_dtype(x) for x in operands if not isinstance(x, Type)],
    ]
    result: torch.dtype | None = None
    for group in groups:
        for dtype in [_all_of(group)]:
            if dtype is None:
                continue
            if result is None:
                result = dtype
            elif category(result) < 2 and (category(result) == 0 or category(dtype) == 2):
                result = join(result, dtype)
    if result is None:
        raise UncoveredError("no operand")
    return result


def _all_of(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    result: torch.dtype | None = None
    for dtype in dtypes:
        result = dtype if result is None else join(result, dtype)
    return result


def shape_of(x: Operand) -> tuple[int, ...]:
    return x.shape if isinstance(x, Type) else ()


def floating(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a result that has to be a float."""
    return dtype if category(dtype) == 2 else torch.get_default_dtype()


def wrapped(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    require(-max(rank, 1) <= dim < max(rank, 1), f"there is no dimension {dim} among {rank}")
    return dim % max(rank, 1)


def dims_of(x: Type, dim: int | Sequence[int] | None) -> list[int]:
    """The dimensions meant; all of them for None and for an empty list."""
    chosen = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if not x.rank or not chosen:
        return list(range(x.rank))
    return [wrapped(d, x.rank) for d in chosen]
