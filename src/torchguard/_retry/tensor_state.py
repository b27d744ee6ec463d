"""The tensors that a step may change beside gradients: saved before it, and put back.

Buffers are compared and restored by content: BatchNorm's statistics and writes through `.data` do not move a tensor's
version. Buffers and small tensors are copied before every step. Other tensors (frozen parameters, tensors in attributes
and cells) may be as large as the model, and most never change. They are copied in the first step, or where they are too
large for that, reduced to a checksum; those that the step changed are copied from then on. If a later step is bad, it
is run again, and a tensor that this changes although it was not copied cannot be restored: it is named, and the step is
given up. The parameters that an optimizer trains are never copied. A closure that changes one is refused.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchguard._health import local
from torchguard._retry.reach import Reached
from torchguard._torch.tensors import Versions, is_unchanged, versions_of
from torchguard._torch.training import copy_all, module_dicts, norms

_MAX_BYTES = 64 * 2**20  # of a tensor that is no buffer, to be copied in the first step
_SMALL = 2**18  # bytes of one that is copied before every step
_MAX_SMALL = 2**25  # bytes of all of these

Named = dict[int, tuple[str, Tensor]]


@dataclass
class Replaced:
    """A tensor that a step put in the place of another.

    Args:
        name: for messages.
        old: what was there before the step, if that was a tensor.
        new: what is there now.
        is_buffer: whether a module has it registered.
    """

    name: str
    old: Tensor | None
    new: Tensor
    is_buffer: bool

    def has_fault(self) -> Tensor:
        """Whether it has NaN or Inf that was not there before. Nothing waits for the device.

        -Inf in a tensor that is no registered buffer, or that is new, is a mask.
        """
        if self.is_buffer and self.old is not None and _alike(self.old, self.new):
            return _new_faults(self.new, self.old).any()
        return (self.new.isnan() | self.new.isposinf()).any()


def _new_faults(tensor: Tensor, before: Tensor) -> Tensor:
    """Where a tensor is NaN or Inf and was not, or not the same."""
    return ~tensor.isfinite() & (tensor != before) & ~(tensor.isnan() & before.isnan())


class TensorState:
    """The tensors that a step may change, over all steps of a `Retry`."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a tensor, and its value before the step
        self._checksums: dict[int, tuple[str, Tensor, Tensor]] = {}  # of tensors that are not copied
        self._changing: set[int] = set()
        self._constant: dict[int, tuple[str, weakref.ref[Tensor], int]] = {}  # by id: seen not to change; data pointer
        self._versions: Versions = []  # of the constant ones, before the step
        self._saved: list[tuple[str, Tensor, Tensor]] = []
        self._masks: set[int] = set()  # ids of those with NaN or Inf that no step put there
        self._trained: set[int] = set()
        self._small: set[int] = set()  # ids of those that are copied before every step, whether they change or not
        self.has_learned = False

    def save(self, buffers: Named, others: Named, trained: set[int]) -> None:
        """Copy what a step may change.

        Args:
            buffers: of all modules.
            others: all other tensors, parameters included.
            trained: the ids of those that an optimizer trains. A step must not change these.
        """
        self._trained = trained
        self._checksums, constants, self._small, small_bytes = {}, [], set(), 0
        self._constant = {key: known for key, known in self._constant.items() if known[1]() is not None}
        wanted: list[tuple[str, Tensor]] = [*buffers.values()]
        for key, (name, tensor) in others.items():
            known = self._constant.get(key)
            if known is not None and known[1]() is tensor and (key in trained or known[2] == tensor.data_ptr()):
                constants.append(tensor)
            elif key in trained:
                self._checksums[key] = name, tensor, checksum(tensor)
            elif tensor.nbytes <= _SMALL and not tensor.requires_grad and small_bytes + tensor.nbytes <= _MAX_SMALL:
                small_bytes += tensor.nbytes
                self._small.add(key)
                wanted.append((name, tensor))
            elif key in self._changing or tensor.nbytes <= (_SMALL if tensor.requires_grad else _MAX_BYTES):
                wanted.append((name, tensor))
            else:
                self._checksums[key] = name, tensor, checksum(tensor)
        self._versions = versions_of([one for one in constants if not one.is_inference()])
        targets, sources, self._saved, copies = [], [], [], {}
        for name, whole in wanted:
            tensor = _without_overlap(whole)
            kept = self._copies.get(id(whole))
            if kept is None or kept[0] is not whole or not _alike(kept[1], tensor):
                kept = whole, torch.empty_like(tensor, requires_grad=False)
            copies[id(whole)] = kept
            self._saved.append((name, whole, kept[1]))
            targets.append(kept[1])
            sources.append(tensor.detach())
        self._copies = copies
        with torch.no_grad():
            copy_all(targets, sources)
        self._buffers = {*buffers}

    def learn(self) -> list[str]:
        """After a finite step: which of the tensors that are no buffers did it change?

        Returns:
            The names of those that an optimizer trains.
        """
        self.has_learned = True
        for tensor, before in () if is_unchanged(self._versions) else self._versions:
            if not is_unchanged([(tensor, before)]):
                del self._constant[id(tensor)]
                self._changing.add(id(tensor))
        known = self._buffers | self._changing | self._small
        for name, tensor, copy in self._saved:
            if id(tensor) in known:
                continue
            if _equal(_without_overlap(tensor), copy):
                self._constant[id(tensor)] = name, weakref.ref(tensor), tensor.data_ptr()
            else:
                self._changing.add(id(tensor))
        for key, (name, tensor, before) in self._checksums.items():
            if bool((checksum(tensor) == before).all()):
                self._constant[key] = name, weakref.ref(tensor), tensor.data_ptr()
            elif key not in self._trained:
                self._changing.add(key)
        return [name for key, (name, _, _) in self._checksums.items() if key in self._trained - self._constant.keys()]

    def restore(self) -> None:
        _copy_back([(tensor, copy) for _, tensor, copy in self._saved])

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Put back what is changed in this context."""
        now = [(tensor, _without_overlap(tensor).detach().clone()) for _, tensor, _ in self._saved]
        yield
        _copy_back(now)

    def restore_where(self, flag: Tensor) -> None:
        """Restore without waiting, where a flag on the device says so."""
        with torch.no_grad():
            for _, whole, copy in self._saved:
                tensor = _without_overlap(whole).detach()
                tensor.copy_(torch.where(flag.to(tensor.device), copy, tensor))

    def lost(self) -> list[str]:
        """Tensors that were not copied and changed in the first step."""
        return [name for name, tensor, before in self._checksums.values() if bool((checksum(tensor) != before).any())]

    def constants(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The tensors that are assumed not to change, each with its checksum."""
        known = [(name, tensor()) for name, tensor, _ in self._constant.values()]
        return {name: (tensor, checksum(tensor)) for name, tensor in known if tensor is not None}

    def changed_constants(self, before: dict[str, tuple[Tensor, Tensor]]) -> list[str]:
        changed = [name for name, (tensor, old) in before.items() if bool((checksum(tensor) != old).any())]
        for key, (name, _, _) in [*self._constant.items()]:
            if name in changed:
                del self._constant[key]
                self._changing.add(key)
        return changed

    def largest(self) -> Tensor | None:
        """The sum of the largest magnitudes of the saved tensors: finite only if all of them are. None if none.

        What was NaN or Inf before counts as zero where it is known to be.
        """
        floating = []
        for _, tensor, copy in self._saved:
            if tensor.is_floating_point() and tensor.numel():
                one = _without_overlap(tensor).detach()
                is_mask = id(tensor) in self._masks and _alike(one, copy)
                floating.append(torch.where(_new_faults(one, copy), one, 0) if is_mask else one)
        if not floating:
            return None
        device = floating[0].device
        return torch.stack([norm.to(device, torch.float32) for norm in norms(floating, torch.inf)]).sum()

    def newly_non_finite(self) -> list[str]:
        """The saved tensors with NaN or Inf that they did not have before the step."""
        found = []
        for name, tensor, copy in self._saved:
            part = _without_overlap(tensor)
            if not tensor.is_floating_point() or bool(part.isfinite().all()):
                continue
            if not _alike(part, copy) or bool(_new_faults(part, copy).any()):
                found.append(name)
            else:
                self._masks.add(id(tensor))
        return found

    def non_finite(self) -> list[str]:
        """The tensors that had NaN before the step. Inf may be a mask."""
        known = [(name, tensor()) for name, tensor, _ in self._constant.values()]
        named = [*((name, copy) for name, _, copy in self._saved), *known]
        return [name for name, one in named if one is not None and one.is_floating_point() and bool(one.isnan().any())]


def _copy_back(saved: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        pairs = [(_without_overlap(tensor), tensor, copy) for tensor, copy in saved]
        same = [(part, copy) for part, _, copy in pairs if _alike(part, copy)]
        copy_all([part.detach() for part, _ in same], [copy for _, copy in same])
        for part, tensor, copy in pairs:
            if not _alike(part, copy):  # resized, or moved to another dtype
                tensor.data = copy.clone()


def shards_of(named: Named) -> Named:
    """For each DTensor the part of it that is in this process."""
    with torch.no_grad():  # which makes `to_local` return the same object in every call
        return {id(one): (name, one) for name, tensor in named.values() for one in [local(tensor)]}


def tensors_of(reached: Reached, parameters: Iterable[Tensor]) -> tuple[Named, Named]:
    """Buffers, and the other tensors."""
    buffers: Named = {}
    others: Named = {id(one): ("a parameter of an optimizer", one) for one in parameters}
    for path, module in reached.modules:
        of_module, own, _ = module_dicts(module)
        buffers.update({id(one): (f"{path}.{name}", one) for name, one in own.items() if one is not None})
        others.update({id(one): (f"{path}.{name}", one) for name, one in of_module.items() if one is not None})
    others.update({id(tensor): (name, tensor) for name, tensor in reached.tensors if id(tensor) not in others})
    return (
        {key: named for key, named in buffers.items() if _can_be_saved(named[1])},
        {key: named for key, named in others.items() if key not in buffers and _can_be_saved(named[1])},
    )


def _can_be_saved(tensor: Tensor) -> bool:
    """A tensor with values of its own. A result of autograd is made anew by whoever holds it, not written to."""
    return tensor.layout is torch.strided and not tensor.is_nested and (tensor.is_leaf or not tensor.requires_grad)


def _without_overlap(tensor: Tensor) -> Tensor:
    """The elements of a tensor, each once: an expanded tensor has several that are one, and cannot be written to."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor if extent >= tensor.numel() else tensor.detach().as_strided((extent,), (1,))


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, so that NaN equals NaN."""
    return _alike(one, other) and bool((checksum(one) == checksum(other)).all())


def checksum(tensor: Tensor) -> Tensor:
    """Two numbers that change if an element changes, or if rows change places."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.dtype is torch.bool:
        flat = flat.to(torch.uint8)
    elif flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = flat.view(sizes[flat.element_size()])
    width = max(1, int(bits.numel() ** 0.5))
    length = bits.numel() // width * width
    square = bits[:length].view(-1, width)
    sums = [square.sum(dim, dtype=torch.int64) for dim in (0, 1)] + [bits[length:].to(torch.int64)]
    weights = [2 * torch.arange(len(one), device=bits.device, dtype=torch.int64) + 1 for one in sums]
    return torch.stack([(one * weight).sum() for one, weight in zip(sums, weights, strict=True)])
