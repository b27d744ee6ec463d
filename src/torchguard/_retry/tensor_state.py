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
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from torchguard._health import local
from torchguard._retry.copies import Copies, alike, elements_of, is_floating, wide
from torchguard._retry.reach import Reached
from torchguard._torch.tensors import versions
from torchguard._torch.training import module_dicts

_MAX_BYTES = 64 * 2**20  # of a tensor that is no buffer, to be copied in the first step
_SMALL = 2**18  # bytes of one that is copied before every step
_MAX_SMALL = 2**25  # bytes of all of these

Named = dict[int, tuple[str, Tensor]]
_Constant = tuple[str, Callable[[], Tensor | None], int]  # name, weak reference, data pointer
_UNKNOWN: _Constant = "", lambda: None, 0


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
        if self.is_buffer and self.old is not None and alike(self.old, self.new):
            return _new_faults(self.new, self.old).any()
        return (self.new.isnan() | self.new.isposinf()).any()


def _new_faults(tensor: Tensor, before: Tensor) -> Tensor:
    """Where a tensor is NaN or Inf and was not, or not the same."""
    return ~tensor.isfinite() & (tensor != before) & ~(tensor.isnan() & before.isnan())


class TensorState:
    """The tensors that a step may change, over all steps of a `Retry`."""

    def __init__(self) -> None:
        self._copies = Copies([])
        self._names: list[str] = []  # of the copied ones
        self._checksums: dict[int, tuple[str, Tensor, Tensor]] = {}  # of tensors that are not copied
        self._changing: set[int] = set()
        self._constant: dict[int, _Constant] = {}  # by id: seen not to change
        self._watched: list[Tensor] = []  # those that are no buffers
        self._watched_names: list[str] = []
        self._versions: list[int] = []  # of the watched ones, before the step
        self._changed: list[Tensor] = []  # the watched ones whose versions the first run moved
        self._frozen: tuple[list[Tensor], list[int]] = [], []  # constant ones that nobody trains, their data pointers
        self._masks: set[int] = set()  # ids of those with NaN or Inf that no step put there
        self._trained: set[int] = set()
        self._unknown: list[int] = []  # indices of the copied ones of which no step has shown whether they change
        self._source: tuple[Named, Named] | None = (
            None  # what the lists above were made for; None if they are not valid
        )
        self.has_learned = False

    @property
    def is_settled(self) -> bool:
        """Whether it is known of every tensor that is no buffer whether steps change it."""
        return self.has_learned and not self._unknown and not self._checksums

    def save(self, buffers: Named, others: Named, trained: set[int]) -> None:
        """Copy what a step may change.

        Args:
            buffers: of all modules.
            others: all other tensors, parameters included.
            trained: the ids of those that an optimizer trains. A step must not change these.
        """
        if not self._is_valid_for(buffers, others):
            self._sort(buffers, others, trained)
        self._versions = versions(self._watched)
        self._copies.save()

    def _is_valid_for(self, buffers: Named, others: Named) -> bool:
        if self._source is None or self._source[0] is not buffers or self._source[1] is not others or self._checksums:
            return False  # checksums are those of one step: after it, trained parameters change
        frozen, pointers = self._frozen
        return self._copies.fits() and [*map(Tensor.data_ptr, frozen)] == pointers

    def _sort(self, buffers: Named, others: Named, trained: set[int]) -> None:
        """Decide for each tensor whether it is copied, reduced to a checksum, or left alone: it does not change."""
        self._trained, self._checksums = trained, {}
        self._constant = {key: known for key, known in self._constant.items() if known[1]() is not None}
        watched = [(name, tensor) for name, tensor in others.values() if not tensor.is_inference()]
        self._watched_names, self._watched = [name for name, _ in watched], [tensor for _, tensor in watched]
        wanted: list[tuple[str, Tensor]] = [*buffers.values()]
        known = {*buffers, *self._changing}
        frozen, small_bytes = [], 0
        for key, (name, tensor) in others.items():
            constant = self._constant.get(key)
            if (
                constant is not None
                and constant[1]() is tensor
                and (key in trained or constant[2] == tensor.data_ptr())
            ):
                frozen += [] if key in trained else [tensor]
            elif key in trained:
                self._checksums[key] = name, tensor, checksum(tensor)
            elif tensor.nbytes <= _SMALL and small_bytes + tensor.nbytes <= _MAX_SMALL:
                small_bytes += tensor.nbytes
                known.add(key)  # copied before every step, whether it changes or not
                wanted.append((name, tensor))
            elif key in self._changing or tensor.nbytes <= (_SMALL if tensor.requires_grad else _MAX_BYTES):
                wanted.append((name, tensor))
            else:
                self._checksums[key] = name, tensor, checksum(tensor)
        self._frozen = frozen, [*map(Tensor.data_ptr, frozen)]
        self._names = [name for name, _ in wanted]
        self._unknown = [index for index, (_, tensor) in enumerate(wanted) if id(tensor) not in known]
        self._copies = Copies([])  # which frees the memory of the previous ones
        self._copies = Copies([tensor for _, tensor in wanted])
        self._source = buffers, others

    def changed_trained(self) -> list[str]:
        """After a run: the names of the tensors that it changed although an optimizer trains them."""
        now, self._changed = versions(self._watched), []
        if now == self._versions:
            return []
        pairs = zip(self._watched_names, self._watched, now, self._versions, strict=True)
        changed = [(name, tensor) for name, tensor, version, before in pairs if version != before]
        self._changed = [tensor for _, tensor in changed]
        return [name for name, tensor in changed if id(tensor) in self._trained]

    def learn(self) -> list[str]:
        """After a finite step: which of the tensors that are no buffers did it change?

        Returns:
            The names of those that an optimizer trains.
        """
        self.has_learned = True
        self.newly_changing()
        if not self._unknown and not self._checksums:
            return []
        for index in self._unknown:
            tensor = self._copies.tensors[index]
            self._note(self._names[index], tensor, not _equal(elements_of(tensor), self._copies.value(index)))
        for name, tensor, before in self._checksums.values():
            self._note(name, tensor, bool((checksum(tensor) != before).any()))
        return [name for key, (name, _, _) in self._checksums.items() if key in self._trained - self._constant.keys()]

    def _note(self, name: str, tensor: Tensor, is_changed: bool) -> None:
        self._source = None
        if not is_changed:
            self._constant[id(tensor)] = name, weakref.ref(tensor), tensor.data_ptr()
        elif id(tensor) not in self._trained:
            self._changing.add(id(tensor))

    def restore(self) -> None:
        self._copies.restore()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Put back what is changed in this context."""
        now = Copies(self._copies.tensors)
        now.save()
        yield
        now.restore()

    def restore_where(self, flag: Tensor) -> None:
        """Restore without waiting, where a flag on the device says so."""
        self._copies.restore_where(flag)

    def lost(self) -> list[str]:
        """Tensors that were not copied and changed in the first step."""
        return [name for name, tensor, before in self._checksums.values() if bool((checksum(tensor) != before).any())]

    def newly_changing(self) -> list[str]:
        """The tensors whose versions this step moved, and no step before it. They are saved from now on."""
        return self._save_from_now_on({id(tensor) for tensor in self._changed})

    def _save_from_now_on(self, keys: Collection[int]) -> list[str]:
        """Have these tensors copied before each step. The names of those that were not."""
        found = [self._constant.pop(key)[0] for key in keys if key in self._constant]
        if found:
            self._changing.update(keys)
            self._source = None
        return found

    def constants(self) -> dict[int, tuple[Tensor, Tensor]]:
        """The tensors that are assumed not to change, by id, each with its checksum."""
        known = [(key, tensor()) for key, (_, tensor, _) in self._constant.items()]
        return {key: (tensor, checksum(tensor)) for key, tensor in known if tensor is not None}

    def changed_constants(self, before: dict[int, tuple[Tensor, Tensor]]) -> list[str]:
        """The names of those that changed since. They are saved from now on."""
        return self._save_from_now_on(
            [key for key, (tensor, old) in before.items() if bool((checksum(tensor) != old).any())]
        )

    def finiteness(self) -> list[Tensor]:
        """On the devices: finite numbers if all copied tensors are finite. NaN and Inf of before do not count.

        They count where it is not known yet that they were there before.
        """
        copied = enumerate(self._copies.tensors) if self._masks else ()
        masks = frozenset(index for index, one in copied if id(one) in self._masks)
        found = self._copies.finiteness(masks)
        for index in masks:
            one, before = elements_of(self._copies.tensors[index]).detach(), self._copies.value(index)
            is_bad = _new_faults(one, before) if alike(one, before) else ~one.isfinite()
            found.append(torch.where(is_bad.any(), torch.nan, 0.0))
        return found

    def newly_non_finite(self) -> list[str]:
        """The copied tensors with NaN or Inf that they did not have before the step."""
        found = []
        for index, tensor in enumerate(self._copies.tensors):
            part, before = elements_of(tensor).detach(), self._copies.value(index)
            if not is_floating(tensor) or bool(wide(part).isfinite().all()):
                continue
            if not alike(part, before) or bool(_new_faults(wide(part), wide(before)).any()):
                found.append(self._names[index])
            else:
                self._masks.add(id(tensor))
        return found

    def non_finite(self) -> list[str]:
        """The tensors that had NaN before the step. Inf may be a mask."""
        known = [(name, tensor()) for name, tensor, _ in self._constant.values()]
        copies = [(name, self._copies.value(index)) for index, name in enumerate(self._names)]
        return [
            name
            for name, one in [*copies, *known]
            if one is not None and is_floating(one) and bool(wide(one).isnan().any())
        ]


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
        {key: named for key, named in buffers.items() if can_be_saved(named[1])},
        {key: named for key, named in others.items() if key not in buffers and can_be_saved(named[1])},
    )


def can_be_saved(tensor: Tensor) -> bool:
    """A tensor with values of its own. A result of autograd is made anew by whoever holds it, not written to."""
    has_values = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return has_values and (tensor.is_leaf or not tensor.requires_grad)


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, so that NaN equals NaN."""
    return alike(one, other) and bool((checksum(one) == checksum(other)).all())


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
