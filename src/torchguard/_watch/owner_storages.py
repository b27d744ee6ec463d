"""The owners of what a storage holds, whichever view of it is read or written; the row code they amount to; and which
storages are finite, or hold what a use of a parameter returned (`parameter_uses.py`). And which tensors are new.

`owners.py` says what owners are.
"""

import gc
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchguard._torch.dispatch import StorageWeakRef, weak_storage
from torchguard._torch.tensors import mutation_count, storage_of
from torchguard._watch.batch import UNBATCHED, row_code, row_code_of_sample
from torchguard._watch.sample_intervals import Owners, nobody, union

# Where a view lies in its storage: offset, shape, strides and the size of an element.
Geometry = tuple[int, tuple[int, ...], tuple[int, ...], int]


class StorageOwners:
    """The owners of one storage: of the tensor that it was made for (`base`), and of views as far as they are known."""

    def __init__(self, z: Tensor, owners: Owners) -> None:
        self.reference: StorageWeakRef = weak_storage(z)
        self.base: Geometry = geometry_of(z)
        self.views: dict[Geometry, Owners] = {self.base: owners}
        if z.numel() * z.element_size() < z.untyped_storage().nbytes():  # a view of a tensor that belongs to no sample
            self.base = (0, (_count(z),), (1,), z.element_size())
            self.views = {self.base: nobody(self.base[1])}
            self.write(z, owners)

    def read(self, z: Tensor) -> Owners:
        geometry = geometry_of(z)
        if geometry not in self.views:
            flat = self._flat(z)
            self.views[geometry] = self.views[self.base].all().expand(z.shape) if flat is None else _part(flat, z)
        return self.views[geometry]

    def write(self, z: Tensor, owners: Owners) -> None:
        """Set the owners of a view, and with that of all tensors that overlap it."""
        if geometry_of(z) == self.base:
            self.views = {self.base: owners}
            return
        flat = self._flat(z)
        if flat is None or _overlaps_itself(z):
            merged = union([owners.all(), self.views[self.base].all()])
            assert merged is not None
            self.views = {self.base: merged.expand(self.base[1])}
            return
        for one, new in zip(_part(flat, z), owners, strict=True):
            one.copy_(new)
        self.base = (0, (_count(z),), (1,), z.element_size())
        self.views = {self.base: flat}

    def _flat(self, z: Tensor) -> Owners | None:
        """A copy of the owners in the order of the storage; None if that is not known."""
        offset, shape, stride, size = self.base
        if size != z.element_size() or any(a == 0 and b > 1 for a, b in zip(stride, shape, strict=True)):
            return None
        flat = nobody((_count(z),)).apply(Tensor.clone)
        for one, known in zip(flat, self.views[self.base], strict=True):
            one.as_strided(shape, stride, offset).copy_(known)
        return flat


def _part(flat: Owners, z: Tensor) -> Owners:
    return flat.apply(lambda one: one.as_strided(z.shape, z.stride(), z.storage_offset()))


def _count(z: Tensor) -> int:
    return int(z.untyped_storage().nbytes()) // z.element_size()


def geometry_of(z: Tensor) -> Geometry:
    return int(z.storage_offset()), tuple(z.shape), z.stride(), z.element_size()


def _overlaps_itself(z: Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(z.shape, z.stride(), strict=True))


def rows_of(owners: Owners | None, size: int) -> int | None:
    """The row code of a tensor with these owners (see `batch.py`); None if it mixes samples, or has another order."""
    if owners is None:
        return UNBATCHED
    low, high = owners.compact()
    if low.numel() == 0 or bool((high < 0).all()):
        return UNBATCHED
    if bool((low < high).any()):
        return None
    lowest, highest = int(low.amin()), int(high.amax())
    if lowest == highest:
        return row_code_of_sample(lowest)
    for dim in range(low.ndim):
        if low.shape[dim] % size == 0:
            others = [i for i in range(low.ndim) if i != dim]
            first, last = (low.amin(others), high.amax(others)) if others else (low, high)
            if bool((first == last).logical_or(last < 0).all()):
                code = _code_along(dim, last, size)
                if code is not None:
                    return code
    return None


def _code_along(dim: int, owner: Tensor, size: int) -> int | None:
    """The row code for a dim with these owners; rows that belong to no sample (-1) fit anywhere."""
    count = owner.shape[0] // size
    row = torch.arange(owner.shape[0])
    for outer in range(1, count + 1):
        inner = count // outer
        if count % outer == 0 and bool(((owner == row // inner % size) | (owner < 0)).all()):
            return row_code(dim, outer, 0) if outer == 1 else row_code(dim, 0 if inner == 1 else outer, inner)
    return None


class Changes:
    """How often a storage was changed: before it was met first, and by operations of the call since."""

    def __init__(self, z: Tensor) -> None:
        self.storage, self.first, self.count = weak_storage(z), mutation_count(z), 0


class UsedTensors:
    """Which tensors of a call that is followed are finite, and which results of uses an operation met before a check.

    Attributes:
        met: the keys of uses whose results an operation met before a check, so that they have to be protected.
    """

    def __init__(self) -> None:
        # By storage: a reference that keeps its number from being reused, and its number of changes at the check.
        self._clean: dict[int | None, tuple[StorageWeakRef, int]] = {}
        self._unmet: dict[int | None, tuple[Any, bool]] = {}
        self.met: set[Any] = set()

    def note_clean(self, z: Tensor) -> None:
        """Note that a check left a tensor finite, and masks its gradient."""
        self._clean[storage_of(z)] = (weak_storage(z), mutation_count(z))
        self._unmet.pop(storage_of(z), None)

    def is_clean(self, z: Tensor) -> bool:
        _, changes = self._clean.get(storage_of(z), (None, None))
        return changes == mutation_count(z)

    def note_use(self, key: Any, results: Iterable[Tensor], mixes: bool) -> None:
        """Note the results of a use; `mixes`: whether whatever meets them mixes samples."""
        self._unmet |= {storage_of(z): (key, mixes) for z in results}

    def meet(self, given: Iterable[Tensor]) -> bool:
        """An operation that is no view gets these tensors. Returns whether it thereby mixes samples."""
        found = [self._unmet.pop(storage_of(z), (None, False)) for z in given] if self._unmet else []
        self.met |= {key for key, _ in found if key is not None}
        return any(mixes for _, mixes in found)


class _NewObjects:
    """Which objects were created since: those of the youngest generation of the garbage collector.

    The collector is off meanwhile, so that nothing leaves that generation. Several threads may ask at once: then the
    first one decides since when, and more objects count as new.
    """

    def __init__(self) -> None:
        self.lock, self.users, self.was_enabled = threading.Lock(), 0, True

    def enter(self) -> None:
        with self.lock:
            self.users += 1
            if self.users == 1:
                self.was_enabled = gc.isenabled()
                gc.collect(0)
                gc.disable()

    def leave(self) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0 and self.was_enabled:
                gc.enable()


_NEW_OBJECTS = _NewObjects()


@contextmanager
def created_since() -> Iterator[None]:
    """Have `is_new` report what was created since this began."""
    _NEW_OBJECTS.enter()
    try:
        yield
    finally:
        _NEW_OBJECTS.leave()


def is_new(value: object) -> bool:
    """Whether an object was created since `created_since` began."""
    return any(value is one for one in gc.get_objects(0))
