"""Data between tensors and the host: functions of torch that read a tensor into Python or NumPy, or make one of that.

A dispatch mode sees `item`, but neither `numpy`, `tolist` and DLPack nor `torch.tensor([a, b])`, which reads tensors
without dispatching. A `TorchFunctionMode` would see them all, but torch takes other paths under one: the fast path of
`nn.TransformerEncoder` is off. So the functions themselves are replaced, for as long as somebody listens: all are
public in torch 2.11 to 2.15, and required. Listeners are per thread. Other threads meanwhile call the originals through
one more Python function.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from torchguard._torch.process import process_state

# Methods that read a tensor, and functions that make one of nested values, which may hold tensors. Not `__getitem__`,
# which also makes tensors of lists: with a method of that name, C code takes a tensor of no dims for a sequence.
_READERS = ((Tensor, "numpy"), (Tensor, "tolist"), (Tensor, "__dlpack__"))
_MAKERS = ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (torch, "from_numpy"), (Tensor, "new_tensor"))


class Listener(Protocol):
    """Reports data that passes between tensors and the host."""

    def read(self, tensor: Tensor, how: str) -> None:
        """A tensor is read."""
        ...

    def making(self, values: Any, how: str) -> contextlib.AbstractContextManager[None]:
        """A tensor is made of nested values, while the context is open."""
        ...


class _Patches(threading.local):
    """The listener of each thread."""

    listener: Listener | None = None


class _Shared:
    """How many threads listen, and the functions that are replaced meanwhile."""

    def __init__(self) -> None:
        self.lock, self.users, self.here = threading.Lock(), 0, _Patches()
        self.originals: list[tuple[Any, str, Any]] = []


_SHARED = process_state("host data", _Shared)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Report this thread's data between tensors and the host to a listener."""
    shared, before = _SHARED, _SHARED.here.listener
    with shared.lock:
        shared.users += 1
        if shared.users == 1:
            _install(shared)
    shared.here.listener = listener
    try:
        yield
    finally:
        shared.here.listener = before
        with shared.lock:
            shared.users -= 1
            if shared.users == 0:
                for owner, name, original in shared.originals:
                    _put_back(owner, name, original)
                shared.originals.clear()


def _install(shared: _Shared) -> None:
    for functions, replaced in ((_READERS, _noticed_read), (_MAKERS, _noticed_making)):
        for owner, name in functions:
            shared.originals.append((owner, name, owner.__dict__.get(name)))
            setattr(owner, name, replaced(getattr(owner, name), name, shared.here))


def _put_back(owner: Any, name: str, original: Any) -> None:
    if original is None:  # inherited
        delattr(owner, name)
    else:
        setattr(owner, name, original)


def _noticed_read(original: Callable[..., Any], name: str, here: _Patches) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if here.listener is not None:
            here.listener.read(self, name)
        return original(self, *args, **kwargs)

    return read


def _noticed_making(original: Callable[..., Any], name: str, here: _Patches) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(*args: Any, **kwargs: Any) -> Any:
        if here.listener is None:
            return original(*args, **kwargs)
        values = args[1:] if name.startswith("new_") else args
        with here.listener.making((values, kwargs), name):
            return original(*args, **kwargs)

    return make
