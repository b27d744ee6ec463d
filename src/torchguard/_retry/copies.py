"""Copies of many tensors, made with one operation for each device and dtype.

A model has up to hundreds of buffers, most of them small. To copy and to check them one by one in every step takes
longer than the rest of the guard. So the elements of all tensors of a device and dtype are joined in one flat tensor.
Flat views of the tensors are made once. They are valid as long as each tensor has the same shape, dtype and memory.
"""

import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from torchguard._torch.training import copy_all, norms

_MAX_JOINED = 2**20  # bytes of a tensor that is joined with others to be checked, which takes memory once more
_WITH_NORM = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128})
_layout = operator.attrgetter("shape", "dtype")


class Copies:
    """Some tensors, and their values at the time of `save`.

    Args:
        tensors: dense ones.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [*tensors]
        self._layouts, self._pointers = self._places()
        self._strides = [tensor.stride() for tensor in self.tensors]
        self._flat = [_flat_view(tensor) for tensor in self.tensors]  # None where there are gaps between the elements
        self._groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for index, tensor in enumerate(self.tensors):
            self._groups.setdefault((tensor.device, tensor.dtype), []).append(index)
        self._parts: list[Tensor] = [torch.empty(0)] * len(self.tensors)  # of the joined copies
        self._joined: dict[tuple[torch.device, torch.dtype], Tensor] = {}
        for (device, dtype), indices in self._groups.items():
            sizes = [one.numel() for one in self._sources(indices)]
            with torch.inference_mode(False):
                joined = self._joined[device, dtype] = torch.empty(sum(sizes), device=device, dtype=dtype)
            for index, part in zip(indices, joined.split(sizes), strict=True):
                self._parts[index] = part
        self._checked: tuple[frozenset[int], list[list[Tensor]], list[Tensor]] | None = None

    def _places(self) -> tuple[list[tuple[torch.Size, torch.dtype]], list[int]]:
        return [*map(_layout, self.tensors)], [*map(Tensor.data_ptr, self.tensors)]

    def _sources(self, indices: Sequence[int]) -> list[Tensor]:
        flat = [self._flat[index] for index in indices]
        return [
            self.tensors[index].detach().reshape(-1) if one is None else one
            for index, one in zip(indices, flat, strict=True)
        ]

    def fits(self) -> bool:
        """Whether each tensor still has the shape, dtype and memory that it had at first."""
        return not self.tensors or (self._layouts, self._pointers) == self._places()

    def save(self) -> None:
        """Copy the values. The tensors have to fit."""
        for kind, indices in self._groups.items():
            torch.cat(self._sources(indices), out=self._joined[kind])  # noqa: TG123 (one copy a step, in the same memory)

    def value(self, index: int) -> Tensor:
        """The value that the tensor at this index had, of the shape of `elements_of(tensor)`."""
        part, shape = self._parts[index], self._layouts[index][0]
        if part.numel() != shape.numel():
            return part
        if self._flat[index] is None:
            return part.view(shape)
        return part.as_strided(shape, self._strides[index], part.storage_offset())

    def restore(self) -> None:
        """Put the values back."""
        with torch.no_grad():
            if not self.fits():
                for index, tensor in enumerate(self.tensors):
                    _copy_back(tensor, self.value(index))
                return
            flat = [one for one in self._flat if one is not None]
            copy_all(flat, [part for part, one in zip(self._parts, self._flat, strict=True) if one is not None])
            for index, one in enumerate(self._flat):
                if one is None:
                    _memory(self.tensors[index]).copy_(self.value(index))

    def restore_where(self, flag: Tensor) -> None:
        """Put the values back on the device, without waiting, where a flag says so."""
        with torch.no_grad():
            if not self.fits():
                for index, tensor in enumerate(self.tensors):
                    elements = _memory(elements_of(tensor))
                    elements.copy_(torch.where(flag.to(tensor.device), self.value(index), elements))
                return
            for kind, indices in self._groups.items():
                sources = self._sources(indices)
                joined = torch.where(flag.to(kind[0]), self._joined[kind], torch.cat(sources))
                parts = joined.split([one.numel() for one in sources])
                copy_all([self._flat_or_whole(index) for index in indices], self._shaped(indices, parts))

    def _flat_or_whole(self, index: int) -> Tensor:
        flat = self._flat[index]
        return _memory(self.tensors[index]) if flat is None else flat

    def _shaped(self, indices: Sequence[int], parts: Sequence[Tensor]) -> list[Tensor]:
        return [
            part.view(self._layouts[index][0]) if self._flat[index] is None else part
            for index, part in zip(indices, parts, strict=True)
        ]

    def finiteness(self, but: frozenset[int]) -> list[Tensor]:
        """On the devices: numbers that are finite if all tensors are, but for those at some indices. Nothing waits."""
        if not self.tensors:
            return []
        if not self.fits():
            floating = [
                elements_of(one).detach()
                for index, one in enumerate(self.tensors)
                if index not in but and is_floating(one) and one.numel()
            ]
            return [*map(_finiteness, floating)]
        if self._checked is None or self._checked[0] != but:
            self._checked = but, *self._to_check(but)
        _, joined, alone = self._checked
        return [_finiteness(torch.cat(some)) for some in joined] + norms([*map(wide, alone)], math.inf)

    def _to_check(self, but: frozenset[int]) -> tuple[list[list[Tensor]], list[Tensor]]:
        """Flat views to be joined, by device and dtype, and tensors to be checked as they are."""
        joined, alone = [], []
        for indices in self._groups.values():
            some = []
            for index in indices:
                tensor, flat = self.tensors[index], self._flat[index]
                if index in but or not is_floating(tensor) or not tensor.numel():
                    continue
                if flat is not None and tensor.nbytes <= _MAX_JOINED:
                    some.append(flat)
                else:
                    alone.append(tensor.detach())
            joined += [some] if some else []
        return joined, alone


def is_floating(tensor: Tensor) -> bool:
    """Whether a tensor can hold NaN or Inf."""
    return tensor.is_floating_point() or tensor.is_complex()


def _finiteness(tensor: Tensor) -> Tensor:
    """The largest magnitude: finite if all elements are."""
    return torch.linalg.vector_norm(wide(tensor), math.inf)


def wide(tensor: Tensor) -> Tensor:
    """A tensor of a dtype that has norms and comparisons: float8 has neither."""
    return tensor if tensor.dtype in _WITH_NORM else tensor.to(torch.float32)


def _memory(tensor: Tensor) -> Tensor:
    """A tensor to write to without moving its version: what is put back is no change for a `Retry` around this one."""
    return tensor.data  # noqa: TG221 (on purpose)


def _extent(tensor: Tensor) -> int:
    """How many elements of memory a tensor reaches over."""
    return 1 + sum(map(operator.mul, (size - 1 for size in tensor.shape), tensor.stride()))


def _flat_view(tensor: Tensor) -> Tensor | None:
    """A view of the elements in one dim, each once; None if there are gaps between them."""
    if tensor.numel() == 0:
        return None
    extent = _extent(tensor)
    return _memory(tensor).as_strided((extent,), (1,)) if extent <= tensor.numel() else None


def elements_of(tensor: Tensor) -> Tensor:
    """The elements of a tensor, each once: an expanded tensor has several that are one, and cannot be written to."""
    if tensor.numel() == 0:
        return tensor
    extent = _extent(tensor)
    return tensor if extent >= tensor.numel() else tensor.detach().as_strided((extent,), (1,))


def alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _copy_back(tensor: Tensor, value: Tensor) -> None:
    elements = elements_of(tensor)
    if alike(elements, value):
        _memory(elements).copy_(value)
    else:  # resized, or moved to another dtype
        tensor.data = value.clone()
