"""The state of every generator of random numbers that a closure may draw from."""

import ctypes
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchguard._retry.reach import Reached
from torchguard._torch.words import can_read_twister, twister_words


class RandomState:
    """The state of every generator that a closure may draw from."""

    def __init__(self, reached: Reached, devices: Iterable[torch.device]) -> None:
        self._python = _python_state()
        self._numpy = _numpy_state()
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
            elif isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
                own = _bits_of(generator)
                own.state = type(own)(seed).state
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


_python = getattr(random.getstate, "__self__", None)  # the generator behind the functions of `random`
_last_python: tuple[bytes, Any] = b"", None


def _python_state() -> Any:
    """`random.getstate()`, but the last one again if nothing was drawn since: it has 625 numbers.

    As with NumPy, one of two normal numbers may be left over.
    """
    global _last_python
    if type(_python) is not random.Random or not can_read_twister():
        return random.getstate()
    raw = twister_words(_python)
    if raw != _last_python[0] or _last_python[1][2] is not None or _python.gauss_next is not None:  # pyright: ignore[reportAttributeAccessIssue]
        _last_python = raw, random.getstate()
    return _last_python[1]


_KEY_BYTES = 624 * 4 + 4  # of the Mersenne twister's key and position, one behind the other in memory
_last_numpy: tuple[bytes, Any] = b"", None


def _numpy_state() -> Any:
    """`np.random.get_state()`, but the last one again if nothing was drawn since: NumPy takes 35 us to copy it.

    Nothing was drawn if key and position are the same. One of two normal numbers that NumPy draws at once may be left
    over, in which case drawing the other changes neither: then the state is always read.
    """
    global _last_numpy
    generator = np.random.get_bit_generator()  # pyright: ignore[reportAttributeAccessIssue]
    if not isinstance(generator, np.random.MT19937):
        return np.random.get_state()
    raw = ctypes.string_at(generator.ctypes.state_address, _KEY_BYTES)
    if raw != _last_numpy[0]:
        state: Any = np.random.get_state()
        _last_numpy = b"" if state[3] else raw, state
    return _last_numpy[1]


def _device_state(device: torch.device) -> Tensor:
    return torch.get_device_module(device).get_rng_state(*_place(device))


def _place(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # there is one, and torch.mps takes no argument


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.get_state() if isinstance(generator, np.random.RandomState) else _bits_of(generator).state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, (np.random.Generator, np.random.BitGenerator)):
        _bits_of(generator).state = state
    else:
        generator.set_state(state)


def _bits_of(generator: np.random.Generator | np.random.BitGenerator) -> np.random.BitGenerator:
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _same_state(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else repr(one) == repr(other)
