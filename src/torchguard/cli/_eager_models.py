"""`torchguard run --watch` for models that a script calls without compiling them.

A model is a module with parameters that is called outside of all other modules: `model(x)` in a training loop,
`self.net(x)` in a `training_step`. `nn.Module.__call__` is replaced to see that call, and the module is watched in
place from its first call on. A forward hook reads the flags of each call.

Dynamo must not meet the replaced `__call__`. So the original is put back when a module is compiled, and before Dynamo
traces a function. It is put back as well if the script uses `Retry`, which restores the attributes of a model when it
runs a step again. Models that are called for the first time after that are watched only if they are compiled.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchguard._pytrees import tensors_in
from torchguard._torch.modules import has_compiled_parts, is_compiled_in_place, is_compiled_or_scripted
from torchguard._torch.tracing import is_plain
from torchguard._watch.arguments import batch_of
from torchguard.exceptions import TorchGuardError

# Modules that pass the call on to the model that they wrap, which is watched in their place.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


class _Depth(threading.local):
    value = 0


class EagerModels:
    """Watches the models that are called in eager mode.

    Args:
        watch_in_place: watches a model from now on; returns what reads its flags after a call, and None if it cannot
            be watched.
        unwatched: takes the class of each model that cannot be watched, and the reason.
    """

    def __init__(
        self, watch_in_place: Callable[[nn.Module], Callable[[], None] | None], unwatched: dict[str, str]
    ) -> None:
        self._watch_in_place, self._unwatched = watch_in_place, unwatched
        self._depth, self._original = _Depth(), nn.Module.__call__
        self._call: Callable[..., Any] | None = None  # what replaces it
        self._known: dict[int, nn.Module] = {}  # by id, which stays unique while the module is here

    def install(self) -> None:
        depth, original, meet = self._depth, self._original, self._meet

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if depth.value or type(module).__name__ in _WRAPPERS:
                return original(module, *args, **kwargs)
            if id(module) not in self._known:
                meet(module, args, kwargs)
            depth.value += 1
            try:
                return original(module, *args, **kwargs)
            finally:
                depth.value -= 1

        self._call = call
        nn.Module.__call__ = call

    def remove_before_compilations(self) -> None:
        """Have `remove` called before Dynamo first traces."""
        from torchguard._torch.compilations import on_compile_start_and_end  # loads Dynamo

        if not on_compile_start_and_end(lambda _: self.remove(), lambda: None):
            self.remove()

    def remove(self) -> None:
        """Put the original back, unless other code has replaced it since."""
        if nn.Module.__call__ is self._call:
            nn.Module.__call__ = self._original

    def _meet(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Watch a module that is called for the first time, if it is a model."""
        if not _is_model(module) or not all(is_plain(z) for _, z in tensors_in((args, kwargs))):
            return
        name = type(module).__name__
        if isinstance(module, nn.DataParallel):
            self._unwatched[name] = "its replicas run in threads. Use DistributedDataParallel."
            return
        try:
            batch_of(args, kwargs, 0)
        except TorchGuardError as error:
            self._unwatched[name] = str(error)
            return
        self._known[id(module)] = module
        read_flags = self._watch_in_place(module)
        if read_flags is not None:
            self._unwatched.pop(name, None)
            module.register_forward_hook(lambda *_: None if torch.compiler.is_compiling() else read_flags())


def _is_model(module: nn.Module) -> bool:
    """Whether this is a module to watch: it has parameters, and no part of it is compiled or watched already."""
    if next(module.parameters(), None) is None or is_compiled_in_place(module) or has_compiled_parts(module):
        return False
    return not any(is_compiled_or_scripted(one) or getattr(type(one), "_is_watched", False) for one in module.modules())
