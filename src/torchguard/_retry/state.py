"""What a run changes beside gradients, and how it is put back: buffers, Python state, random numbers.

Buffers are compared and restored by content: BatchNorm's statistics and writes through `.data` do not move a tensor's
version. Buffers and small tensors are copied before every step. Other tensors (frozen parameters, tensors in attributes
and cells) may be as large as the model, and most never change. They are copied in the first step, or where they are too
large for that, reduced to a checksum; those that the step changed are copied from then on. If a later step is bad, it
is run again, and a tensor that this changes although it was not copied cannot be restored: it is named, and the step is
given up. The parameters that an optimizer trains are never copied. A closure that changes one is refused.
"""

import contextlib
import itertools
import operator
import random
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CellType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchguard._pytrees import tensors_in
from torchguard._retry.health import local
from torchguard._retry.reach import SIMPLE, Names, Reached, is_filled
from torchguard._torch.tensors import Versions, is_unchanged, versions_of
from torchguard._torch.training import copy_all, module_dicts, norms
from torchguard.exceptions import RetryError

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


class PythonState:
    """Attributes, containers, cells and globals as they are before a step."""

    def __init__(self, reached: Reached) -> None:
        states: list[tuple[str, Any]] = []
        self._buffers: set[int] = set()  # ids of the dicts that hold the buffers of a module
        for name, module in reached.modules:
            if isinstance(module, nn.parallel.DistributedDataParallel):
                continue  # its attributes follow its communication
            dicts = (vars(module), *(one for one in module_dicts(module) if isinstance(one, dict)))
            states += [(name, one) for one in dicts]
            self._buffers.add(id(module_dicts(module)[1]))
        self._states = states + reached.states
        kinds = [state for _, state in self._states]
        self._dicts = [state for state in kinds if isinstance(state, dict)]
        self._keyed = [state for _, state in reached.states if isinstance(state, dict)]  # no module's attributes
        self._names = [state for state in kinds if isinstance(state, Names)]
        self._cells = [state for state in kinds if isinstance(state, CellType)]
        self._arrays = any(isinstance(state, np.ndarray) for state in kinds)
        special = (dict, Names, CellType, np.ndarray)
        self._sequences = [state for state in kinds if not isinstance(state, special)]
        self._globals = reached.globals
        self._save()

    def _save(self) -> None:
        self._saved = [(name, state, _copy(state)) for name, state in self._states]
        self._lengths, self._values = self._flat()

    def _flat(self) -> tuple[list[int], list[Any]]:
        """All lengths, and all values one after the other: to compare them at once takes a tenth of a loop's time."""
        parts = [*map(dict.values, self._dicts), *self._keyed, *self._sequences, *map(_contents, self._cells)]
        parts += [state.read().values() for state in self._names]
        return [*map(len, parts)], [*itertools.chain.from_iterable(parts)]

    def update(self) -> bool:
        """Save the current state. False if it holds other objects than plain values that it did not hold before."""
        if any(namespace.get(name) is not value for namespace, name, value in self._globals):
            return False
        lengths, now = self._flat()
        if lengths != self._lengths:
            return False
        if all(map(operator.is_, now, self._values)):
            if self._arrays:
                self._save()
            return True
        pairs = zip(now, self._values, strict=True)
        if not all(isinstance(one, SIMPLE) for one, other in pairs if one is not other):
            return False
        self._save()
        return True

    def is_same(self) -> bool:
        """Whether all is as it was, NumPy arrays aside."""
        lengths, now = self._flat()
        return lengths == self._lengths and all(map(operator.is_, now, self._values))

    def restore(self) -> None:
        for _, state, before in self._saved:
            if not _is_same(state, before):
                _put_back(state, before)

    def changed(self) -> list[str]:
        """The names of what is not as it was."""
        return [name for name, state, before in self._saved if not _is_same(state, before)]

    def replaced(self) -> list[Replaced]:
        """The tensors that were put in the place of others, or where there was none.

        Those that require a gradient are activations that somebody keeps, not state: nothing can be computed from them
        in the next step.
        """
        found = []
        for name, state, before in () if self.is_same() else self._saved:
            if not isinstance(state, (np.ndarray, set)) and not _is_same(state, before):
                now = _copy(state)
                for key in now if isinstance(now, dict) else range(len(now)):
                    old = before.get(key) if isinstance(before, dict) else before[key] if key < len(before) else None
                    if now[key] is not old:
                        olds = dict(tensors_in(old))
                        found += [
                            Replaced(f"{name}.{key}", olds.get(keys), tensor.detach(), id(state) in self._buffers)
                            for keys, tensor in tensors_in(now[key])
                            if tensor.is_floating_point()
                            and not tensor.requires_grad
                            and tensor.layout is torch.strided
                        ]
        return found


def _copy(state: Any) -> Any:
    if isinstance(state, (dict, np.ndarray)):
        return state.copy()
    if isinstance(state, Names):
        return state.read()
    return _contents(state) if isinstance(state, CellType) else [*state]


def _contents(cell: CellType) -> list[Any]:
    return [cell.cell_contents] if is_filled(cell) else []


def _is_same(state: Any, before: Any) -> bool:
    """Whether a state holds the same objects as its copy."""
    if isinstance(state, np.ndarray):
        return state.shape == before.shape and state.tobytes() == before.tobytes()
    now = state if isinstance(state, (dict, list)) else _copy(state)
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(map(operator.is_, now.values(), before.values())) and now.keys() == before.keys()
    return all(map(operator.is_, now, before))


def _put_back(state: Any, before: Any) -> None:
    if isinstance(state, np.ndarray):
        state.resize(before.shape, refcheck=False)
        state[...] = before
    elif isinstance(state, Names):
        now = state.read()
        for name in now.keys() - before.keys():
            state.delete(name)
        for name, value in before.items():
            if name not in now or now[name] is not value:
                state.write(name, value)
    elif isinstance(state, CellType):
        if before:
            state.cell_contents = before[0]
        else:
            del state.cell_contents
    else:
        state.clear()
        state.update(before) if isinstance(state, (dict, set)) else state.extend(before)


class RandomState:
    """The state of every generator that a closure may draw from."""

    def __init__(self, reached: Reached, devices: Iterable[torch.device]) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._devices = [(one, _device_state(one)) for one in devices if one.type not in ("cpu", "meta")]
        self._own = [(one, _state_of(one)) for _, one in reached.generators]

    def restore(self, stream: int = 0) -> None:
        """Put all back; for another stream than 0, to a state that depends on it alone."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        for device, state in self._devices:
            torch.get_device_module(device).set_rng_state(state, *_place(device))
        for generator, state in self._own:
            _set_state(generator, state)
        if stream:
            self._seed(random.getrandbits(31) ^ (0x9E3779B9 * stream & 0x7FFFFFFF))

    def _seed(self, seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        for generator, _ in self._own:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(seed).state
            else:
                generator.seed(seed)

    def is_unchanged(self) -> bool:
        """Whether nothing was drawn since."""
        numpy = np.random.get_state()
        return (
            random.getstate() == self._python
            and all(np.array_equal(one, other) for one, other in zip(numpy, self._numpy, strict=True))
            and torch.equal(torch.get_rng_state(), self._torch)
            and all(torch.equal(_device_state(one), state) for one, state in self._devices)
            and all(_same_state(_state_of(one), state) for one, state in self._own)
        )


def _device_state(device: torch.device) -> Tensor:
    return torch.get_device_module(device).get_rng_state(*_place(device))


def _place(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is one, and torch.mps takes no argument


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _same_state(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else repr(one) == repr(other)


def refuse_uninitialized(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Lazy modules make their parameters in the first run, which cannot be undone."""
    for path, module in modules:
        if any(torch.nn.parameter.is_lazy(one) for one in module.parameters(recurse=False)):
            raise RetryError(f"Retry: {path} has parameters that are not initialized. Run the model once before.")
