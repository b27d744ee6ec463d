"""`torchguard run --watch` for models that a script calls without compiling them.

A model is a module with parameters that is called outside of all other modules: `model(x)` in a training loop,
`self.net(x)` in a `training_step`. `nn.Module.__call__` is replaced to see that call. The module is watched in place
while the call runs, and is the script's own again when it has ended: the script may copy, pickle, script or change it.
A checkpoint that recomputes a part of a model in backward has to find the same hooks, so they are attached then, too.

Dynamo must not meet the replaced `__call__`. So the original is put back when a module is compiled, and before Dynamo
traces a function. It is put back as well if the script uses `Retry`, which restores the attributes of a model when it
runs a step again. Models are watched from then on only if they are compiled.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from torch import nn

from torchguard._pytrees import tensors_in
from torchguard._torch.modules import (
    forward_hooks,
    has_compiled_parts,
    is_compiled_in_place,
    is_compiled_or_scripted,
)
from torchguard._torch.tracing import is_in_backward, is_plain
from torchguard._watch import watch
from torchguard._watch.arguments import batch_of
from torchguard.exceptions import TorchGuardError

# Modules that pass the call on to the model that they wrap, which is watched in their place.
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")


class Log(Protocol):
    """What records the calls of a model."""

    watched: Any
    problem: str

    def read_flags(self) -> None: ...

    def finish(self) -> None: ...


class _ThreadState(threading.local):
    depth = 0


class EagerModel:
    """A model that is watched while it is called."""

    def __init__(self, model: nn.Module, quarantine: bool, log_of: Callable[[nn.Module, Any], Log]) -> None:
        self.model, self._quarantine = model, quarantine
        self._class, self._running, self._lock = type(model), 0, threading.Lock()
        self._other_state: Any = None
        self._watch()
        self.log = log_of(model, self._watched)
        self._detach()
        self.unwatched_calls = 0

    def _watch(self) -> None:
        self._forward = self.model.__dict__.get("forward")
        self._watched = watch(self.model, returns="output", quarantine=self._quarantine)
        state = self._state = self._watched._watch
        self._hooks = forward_hooks(self.model, lambda hook: getattr(hook, "watch", None) is state)

    @contextmanager
    def attached(self, is_called: bool = True) -> Iterator[None]:
        """Within it, the model is a watched one, in all threads."""
        with self._lock:
            if not self._running:
                # It may have been compiled since, and be watched for that.
                self._class, self._other_state = type(self.model), self.model.__dict__.pop("_watch", None)
                if is_called and self.model.__dict__.get("forward") is not self._forward:  # the script has replaced it
                    self._watch()
                    self.log.watched = self._watched
                self._attach()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._detach()

    def _attach(self) -> None:
        self.model.__dict__["_watch"] = self._state
        for hooks, key, hook in self._hooks:
            hooks[key] = hook
        self.model.__class__ = type(self._watched)

    def _detach(self) -> None:
        self.model.__class__ = self._class
        for hooks, key, _ in self._hooks:
            hooks.pop(key, None)
        self.model.__dict__.pop("_watch", None)
        if self._other_state is not None:
            self.model.__dict__["_watch"] = self._other_state


class EagerModels:
    """Watches the models that are called in eager mode.

    Args:
        quarantine: as for `watch`.
        new_log: makes the log of a model and its watched model.
        unwatched: takes the class of each model that cannot be watched, and the reason.
    """

    def __init__(self, quarantine: bool, new_log: Callable[[nn.Module, Any], Log], unwatched: dict[str, str]) -> None:
        self._quarantine, self._new_log, self._unwatched = quarantine, new_log, unwatched
        self._thread, self._original = _ThreadState(), nn.Module.__call__
        self._call: Callable[..., Any] | None = None  # what replaces it
        self._lock = threading.Lock()
        self._models: dict[int, EagerModel] = {}  # by id, which stays unique while the model is here
        self._by_part: dict[int, EagerModel] = {}

    def install(self) -> None:
        thread, original, around = self._thread, self._original, self._around

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if thread.depth or type(module).__name__ in _WRAPPERS:
                return original(module, *args, **kwargs)
            thread.depth += 1
            try:
                with around(module, args, kwargs):
                    return original(module, *args, **kwargs)
            finally:
                thread.depth -= 1

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
            for one in self._models.values():
                one.log.problem = one.log.problem or "eager calls after the first compilation were not watched."

    def finish(self) -> None:
        """End the logs, and note in them which calls were not watched."""
        for one in self._models.values():
            with one.attached(is_called=False):
                one.log.finish()
            if one.unwatched_calls:
                number = f"{one.unwatched_calls} call{'' if one.unwatched_calls == 1 else 's'}"
                one.log.problem = one.log.problem or f"{number} more had no samples to watch."

    def _around(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What to enter around a call."""
        if is_in_backward():
            of_part = self._by_part.get(id(module))
            return nullcontext() if of_part is None else of_part.attached()
        tensors = [z for _, z in tensors_in((args, kwargs))]
        if not all(is_plain(z) and z.device.type != "meta" for z in tensors):
            return nullcontext()
        with self._lock:  # another thread may call the same model for the first time
            known = self._models.get(id(module))
            if known is None and not _is_model(module):
                return nullcontext()
            try:
                batch_of(args, kwargs, 0)
                return self._watched_call(known or self._new(module))
            except TorchGuardError as error:
                if known is None:
                    self._unwatched[type(module).__name__] = str(error)
                else:
                    known.unwatched_calls += 1
                return nullcontext()

    def _new(self, module: nn.Module) -> EagerModel:
        if isinstance(module, nn.DataParallel):
            raise TorchGuardError("its replicas run in threads. Use DistributedDataParallel.")
        found = self._models[id(module)] = EagerModel(module, self._quarantine, self._new_log)
        self._by_part |= dict.fromkeys(map(id, module.modules()), found)
        self._unwatched.pop(type(module).__name__, None)
        return found

    @contextmanager
    def _watched_call(self, one: EagerModel) -> Iterator[None]:
        with one.attached():
            yield
            one.log.read_flags()


def _is_model(module: nn.Module) -> bool:
    """Whether this is a module to watch: it has parameters, and no part of it is compiled or watched already."""
    if next(module.parameters(), None) is None or is_compiled_in_place(module) or has_compiled_parts(module):
        return False
    return not any(is_compiled_or_scripted(one) or getattr(type(one), "_is_watched", False) for one in module.modules())
