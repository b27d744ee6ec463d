"""Intervals of samples: what each element of a tensor depends on, and how that of several tensors is joined.

`owners.py` says what the intervals are for.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

# The interval of an element that depends on no sample.
NO_LOW, NO_HIGH = torch.iinfo(torch.int32).max, -1
# From this number on, finding out that owners are equal takes less time than it saves.
_MANY = 256


class Owners(NamedTuple):
    """The lowest and the highest sample that each element depends on, int32, in the shape of the tensor."""

    low: Tensor
    high: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.low.shape

    def compact(self) -> "Owners":
        """With the size 1 along all dims where the owners are stored once."""
        return Owners(compact(self.low), compact(self.high))

    def stored_once(self) -> "Owners":
        """Stored once along all dims along which they are equal: what follows is as fast as it is small."""
        return Owners(_stored_once(self.low), _stored_once(self.high))

    def expand(self, shape: Sequence[int]) -> "Owners":
        return Owners(self.low.expand(shape), self.high.expand(shape))

    def over(self, dims: Sequence[int]) -> "Owners":
        """With the size 1 along some dims: what depends on all elements along them."""
        if not dims or self.low.ndim == 0:
            return self
        low, high = self.compact()
        dims = [dim % low.ndim for dim in dims]
        reduced = Owners(low.amin(dims, keepdim=True), high.amax(dims, keepdim=True))
        return reduced.expand([1 if i in dims else size for i, size in enumerate(self.shape)])

    def reshape(self, shape: Sequence[int]) -> "Owners":
        return Owners(_reshape(self.low, shape), _reshape(self.high, shape))

    def apply(self, function: Callable[[Tensor], Tensor]) -> "Owners":
        return Owners(function(self.low), function(self.high))

    def all(self) -> "Owners":
        """As one element that depends on all elements."""
        low, high = self.compact()
        return Owners(low.amin(), high.amax())

    def is_empty(self) -> bool:
        return self.low.numel() == 0


def nobody(shape: Sequence[int]) -> Owners:
    """The owners of a tensor that depends on no sample."""
    low, high = (torch.tensor(number, dtype=torch.int32) for number in (NO_LOW, NO_HIGH))
    return Owners(low, high).expand(shape)


def compact(z: Tensor) -> Tensor:
    """With the size 1 along all dims where a tensor stores its elements once."""
    for dim, (size, stride) in enumerate(zip(z.shape, z.stride(), strict=True)):
        if size > 1 and stride == 0:
            z = z.narrow(dim, 0, 1)
    return z


def _stored_once(z: Tensor) -> Tensor:
    stored = compact(z)
    if stored.numel() < _MANY:
        return z
    for dim, size in enumerate(stored.shape):
        first = stored.narrow(dim, 0, 1)
        if size > 1 and torch.equal(first.expand(stored.shape), stored):
            stored = first
    return stored.expand(z.shape)


def _reshape(z: Tensor, shape: Sequence[int]) -> Tensor:
    """`z.reshape(shape)`, without storing more: dims that are stored once, and become dims of their own, stay so."""
    shape = [*shape]
    if z.numel() == 0:
        return z.reshape(shape)
    if -1 in shape:
        shape[shape.index(-1)] = z.numel() // -math.prod(shape)
    stored, ones = z, []
    for before, after in _factors(z.shape, shape):
        is_once = all(z.shape[dim] == 1 or z.stride(dim) == 0 for dim in before)
        for dim in before if is_once else ():
            stored = stored.narrow(dim, 0, 1)
        ones += [1 if is_once else shape[dim] for dim in after]
    return stored.reshape(ones).expand(shape)


def _factors(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[range, range]]:
    """The dims of two shapes of the same number of elements, in groups that have as many elements in both."""
    start, end = 0, 0
    i = j = 0
    while i < len(before) or j < len(after):
        one, other = 1, 1
        while i < len(before) and (i == start or one < other or before[i] == 1):
            one, i = one * before[i], i + 1
            while j < len(after) and (other < one or after[j] == 1):
                other, j = other * after[j], j + 1
        if i == start:  # all that is left has one element
            j = len(after)
        yield range(start, i), range(end, j)
        start, end = i, j


def union(owners: Sequence[Owners | None]) -> Owners | None:
    """What depends on several tensors, element by element, broadcast against each other."""
    present = [one for one in owners if one is not None]
    if len(present) < 2:
        return present[0] if present else None
    small = [one.compact() for one in present]
    low, high = reduce(torch.minimum, [one.low for one in small]), reduce(torch.maximum, [one.high for one in small])
    return Owners(low, high).expand(torch.broadcast_shapes(*[one.shape for one in present]))


class Call(NamedTuple):
    """One operation: its arguments by name, the owners of every tensor in them, and its outputs.

    Args:
        is_constant: whether a tensor has the same values in every call.
    """

    name: str
    op: Any
    arguments: dict[str, Any]
    owner: Callable[[Any], Owners | None]
    is_constant: Callable[[Tensor], bool]
    outputs: list[Tensor]

    def of(self, name: str) -> Owners | None:
        return self.owner(self.arguments.get(name))

    def tensors(self) -> list[Tensor]:
        found = []
        for value in self.arguments.values():
            if isinstance(value, Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found += [one for one in value if isinstance(one, Tensor)]
        return found

    def dims(self, name: str, ndim: int) -> list[int]:
        """The dims that an argument names; all if it is None or empty."""
        given = self.arguments.get(name)
        if given is None or given == []:
            return [*range(ndim)]
        return [dim % ndim for dim in ([given] if isinstance(given, int) else given)] if ndim else []


Rule = Callable[[Call], Any]


def everything(call: Call) -> Owners | None:
    """The rule for operations that have none: each output depends on everything."""
    present = [owners.all() for z in call.tensors() if (owners := call.owner(z)) is not None and not owners.is_empty()]
    return union(present)
