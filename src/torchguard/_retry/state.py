"""What a run changes beside gradients, and how it is put back: buffers, Python state, random numbers.

Buffers are compared and restored by content: BatchNorm's statistics and writes through `.data` do not move a tensor's
version. Buffers are copied before every step. Other tensors (frozen parameters, tensors in attributes and cells) may be
as large as the model, and most never change. They are copied in the first step, or where they are too large for that,
reduced to a checksum; those that the step changed are copied from then on. If a later step is bad, it is run again, and
a tensor that this changes although it was never copied cannot be restored: it is named, and the step is given up.
"""

import contextlib
import itertools
import operator
import random
from collections.abc import Iterable, Iterator
from types import CellType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchguard._retry.health import local
from torchguard._retry.reach import SIMPLE, GlobalNames, Reached, Slots, is_filled
from torchguard._torch.training import copy_all, module_dicts, norms
from torchguard.exceptions import RetryError

_MAX_BYTES = 64 * 2**20  # of a tensor that is no buffer, to be copied in the first step
_MAX_LESSONS = 4  # steps after which tensors are compared to learn which of them change

Named = dict[int, tuple[str, Tensor]]


class TensorState:
    """The tensors that a step may change, over all steps of a `Retry`."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a tensor, and its value before the step
        self._checksums: dict[int, tuple[str, Tensor, Tensor]] = {}  # of tensors that are not copied
        self._changing: set[int] = set()
        self._lessons = 0
        self._constant: dict[int, tuple[str, Tensor, int]] = {}  # by id: seen not to change; data pointer
        self._saved: list[tuple[str, Tensor, Tensor]] = []

    def save(self, buffers: Named, others: Named) -> None:
        """Copy what a step may change."""
        self._checksums = {}
        wanted: list[tuple[str, Tensor]] = [*buffers.values()]
        for key, (name, tensor) in others.items():
            known = self._constant.get(key)
            if known is not None and known[1] is tensor and known[2] == tensor.data_ptr():
                continue
            if key in self._changing or tensor.nbytes <= _MAX_BYTES:
                wanted.append((name, tensor))
            else:
                self._checksums[key] = name, tensor, checksum(tensor)
        targets, sources, self._saved, copies = [], [], [], {}
        for name, tensor in wanted:
            kept = self._copies.get(id(tensor))
            if kept is None or kept[0] is not tensor or not _alike(kept[1], tensor):
                kept = tensor, torch.empty_like(tensor)
            copies[id(tensor)] = kept
            self._saved.append((name, tensor, kept[1]))
            targets.append(kept[1])
            sources.append(tensor.detach())
        self._copies = copies
        with torch.no_grad():
            copy_all(targets, sources)
        self._buffers = {*buffers}

    def learn(self) -> None:
        """After a finite step: which of the tensors that are no buffers did it change? Waits for the device."""
        self._lessons += 1
        for name, tensor, copy in self._saved:
            if id(tensor) in self._buffers or id(tensor) in self._changing:
                continue
            if _equal(tensor, copy):
                self._constant[id(tensor)] = name, tensor, tensor.data_ptr()
            else:
                self._changing.add(id(tensor))
        for key, (name, tensor, before) in self._checksums.items():
            if bool((checksum(tensor) == before).all()):
                self._constant[key] = name, tensor, tensor.data_ptr()
            else:
                self._changing.add(key)

    @property
    def has_news(self) -> bool:
        """Whether `learn` would tell something. It gives up on closures that make new tensors in every step."""
        if self._lessons >= _MAX_LESSONS:
            return False
        known = self._buffers | self._changing
        return bool(self._checksums) or any(id(tensor) not in known for _, tensor, _ in self._saved)

    def restore(self) -> None:
        _copy_back([(tensor, copy) for _, tensor, copy in self._saved])

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Put back what is changed in this context."""
        now = [(tensor, tensor.detach().clone()) for _, tensor, _ in self._saved]
        yield
        _copy_back(now)

    def restore_where(self, flag: Tensor) -> None:
        """Restore without waiting, where a flag on the device says so."""
        with torch.no_grad():
            for _, tensor, copy in self._saved:
                tensor.detach().copy_(torch.where(flag.to(tensor.device), copy, tensor))

    def lost(self) -> list[str]:
        """Tensors too large to copy that changed in the first step."""
        return [name for name, tensor, before in self._checksums.values() if bool((checksum(tensor) != before).any())]

    def constants(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The tensors that are assumed not to change, each with its checksum."""
        return {name: (tensor, checksum(tensor)) for name, tensor, _ in self._constant.values()}

    def changed_constants(self, before: dict[str, tuple[Tensor, Tensor]]) -> list[str]:
        changed = [name for name, (tensor, old) in before.items() if bool((checksum(tensor) != old).any())]
        for key, (name, _, _) in [*self._constant.items()]:
            if name in changed:
                del self._constant[key]
                self._changing.add(key)
        return changed

    def largest(self) -> Tensor | None:
        """The sum of the largest magnitudes of the saved tensors: finite only if all of them are. None if none."""
        floating = [tensor.detach() for _, tensor, _ in self._saved if tensor.is_floating_point() and tensor.numel()]
        if not floating:
            return None
        device = floating[0].device
        return torch.stack([norm.to(device, torch.float32) for norm in norms(floating, torch.inf)]).sum()

    def newly_non_finite(self) -> list[str]:
        """The saved tensors with NaN or Inf that they did not have before the step."""
        found = []
        for name, tensor, copy in self._saved:
            if tensor.is_floating_point() and _alike(tensor, copy):
                same = (tensor == copy) | (tensor.isnan() & copy.isnan())
                if bool((~tensor.isfinite() & ~same).any()):
                    found.append(name)
            elif tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                found.append(name)
        return found


def _copy_back(pairs: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        same = [(tensor, copy) for tensor, copy in pairs if _alike(tensor, copy)]
        copy_all([tensor.detach() for tensor, _ in same], [copy for _, copy in same])
        for tensor, copy in pairs:
            if not _alike(tensor, copy):  # resized, or moved to another dtype
                tensor.data = copy.clone()


def shards_of(named: Named) -> Named:
    """For each DTensor the part of it that is in this process."""
    with torch.no_grad():  # which makes `to_local` return the same object in every call
        return {id(one): (name, one) for name, tensor in named.values() for one in [local(tensor)]}


def tensors_of(reached: Reached, trained: set[int]) -> tuple[Named, Named]:
    """Buffers, and the other tensors that no optimizer trains."""
    buffers: Named = {}
    others: Named = {}
    for path, module in reached.modules:
        parameters, own, _ = module_dicts(module)
        buffers.update({id(one): (f"{path}.{name}", one) for name, one in own.items() if one is not None})
        others.update({id(one): (f"{path}.{name}", one) for name, one in parameters.items() if one is not None})
    others.update({id(tensor): (name, tensor) for name, tensor in reached.tensors})
    others = {
        key: named
        for key, named in others.items()
        if key not in trained and key not in buffers and _can_be_saved(named[1])
    }
    return {key: named for key, named in buffers.items() if _can_be_saved(named[1])}, others


def _can_be_saved(tensor: Tensor) -> bool:
    """A tensor with values of its own. A result of autograd is made anew by whoever holds it, not written to."""
    return tensor.layout is torch.strided and not tensor.is_nested and (tensor.is_leaf or not tensor.requires_grad)


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
    weights = [2 * torch.arange(len(one), device=bits.device) + 1 for one in sums]
    return torch.stack([(one * weight).sum() for one, weight in zip(sums, weights, strict=True)])


class PythonState:
    """Attributes, containers, cells and globals as they are before a step."""

    def __init__(self, reached: Reached) -> None:
        modules = [one for one in reached.modules if not isinstance(one[1], nn.parallel.DistributedDataParallel)]
        states = [(name, state) for name, module in modules for state in (vars(module), *module_dicts(module))]
        states += reached.states
        self._dicts = [(name, state) for name, state in states if isinstance(state, dict)]
        self._others = [(name, state) for name, state in states if not isinstance(state, dict)]
        self._globals = reached.globals
        self._save()

    def _save(self) -> None:
        self._saved = [(name, state, _copy(state)) for name, state in (*self._dicts, *self._others)]
        self._values = self._flat()

    def _flat(self) -> list[Any]:
        """All values one after the other: to compare them at once takes a tenth of the time of a loop."""
        found = [*itertools.chain.from_iterable([state.values() for _, state in self._dicts])]
        for _, state in self._others:
            copied = _copy(state)
            found += copied.values() if isinstance(copied, dict) else copied
        return found

    def update(self) -> bool:
        """Save the current state. False if it holds other objects than plain values that it did not hold before."""
        if any(namespace.get(name) is not value for namespace, name, value in self._globals):
            return False
        now = self._flat()
        if len(now) != len(self._values):
            return False
        if all(map(operator.is_, now, self._values)):
            return True
        pairs = zip(now, self._values, strict=True)
        if not all(isinstance(one, SIMPLE) for one, other in pairs if one is not other):
            return False
        self._save()
        return True

    def restore(self) -> None:
        for _, state, before in self._saved:
            if not _is_same(state, before):
                _put_back(state, before)

    def changed(self) -> list[str]:
        """The names of what is not as it was."""
        return [name for name, state, before in self._saved if not _is_same(state, before)]


def _copy(state: Any) -> Any:
    if isinstance(state, dict):
        return dict(state)
    if isinstance(state, (GlobalNames, Slots)):
        return state.read()
    if isinstance(state, CellType):
        return [state.cell_contents] if is_filled(state) else []
    return [*state]


def _is_same(state: Any, before: Any) -> bool:
    """Whether a state holds the same objects as its copy."""
    now = state if isinstance(state, (dict, list)) else _copy(state)
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return all(map(operator.is_, now.values(), before.values())) and now.keys() == before.keys()
    return all(map(operator.is_, now, before))


def _put_back(state: Any, before: Any) -> None:
    if isinstance(state, (GlobalNames, Slots)):
        state.write(before)
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
