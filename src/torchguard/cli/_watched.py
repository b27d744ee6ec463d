"""Watches every model that a script compiles, without the script's knowing.

What watched models saw in the calls of a run.
"""

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchguard._torch.modules import is_compiled_module, uncompiled, wrap_compiled_call
from torchguard._watch import watch
from torchguard.exceptions import TorchGuardError

# Beyond so many, incidents are counted, and no longer kept.
_KEPT = 1_000


@dataclass(frozen=True)
class Sighting:
    """Something that happened to a sample in a call, the calls of a model counted from 1."""

    call: int
    incident: Any

    def to_dict(self) -> dict[str, Any]:
        return {"call": self.call, "text": str(self.incident), **vars(self.incident)}


class Log:
    """The calls of one watched model. Looking never raises, and on a GPU never waits."""

    def __init__(self, model: Any, twin: Any) -> None:
        self.name, self.twin = type(model).__name__, twin
        self.model = model  # as long as it is kept, its id is nobody else's
        self.calls = 0
        self.seen: list[Sighting] = []
        self.total = 0
        self.problem = ""
        self._bad_calls: torch.Tensor | None = None  # on the device, read once at the end
        self._read: Any = None

    def look(self) -> None:
        """Take down what the call that just ended came to."""
        self.calls += 1
        try:
            flags = self.twin.flags
            if flags is None:
                return
            is_bad = (flags != 0).any().to(torch.int64)
            self._bad_calls = is_bad if self._bad_calls is None else self._bad_calls.to(is_bad.device) + is_bad
            if flags.is_cpu:
                self._note(self.twin.report() if is_bad else [])
            elif (found := self.twin.poll()) is not self._read:
                self._note(found or [])
                self._read = found
        except Exception as error:  # a look may fail, the script must not
            self.problem = f"its flags could not be read: {type(error).__name__}: {error}"

    def _note(self, incidents: list[Any]) -> None:
        self.total += len(incidents)
        self.seen += [Sighting(self.calls, one) for one in incidents[: _KEPT - len(self.seen)]]

    def finish(self) -> None:
        """Read the flags of the last call where no call was looked at, or where its flags were still under way."""
        try:
            if self.calls == 0 or (self.twin.flags is not None and not self.twin.flags.is_cpu):
                newest = self.twin.report()
                if newest != self._read:
                    self._note(newest)
        except Exception as error:
            self.problem = f"its flags could not be read: {type(error).__name__}: {error}"

    @property
    def bad_calls(self) -> int:
        """How many calls had something bad in them; it may be more than incidents were read of, on a GPU."""
        counted = 0 if self._bad_calls is None else int(self._bad_calls)
        return max(counted, len({one.call for one in self.seen}))

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "calls": self.calls,
            "bad_calls": self.bad_calls,
            "incidents": [one.to_dict() for one in self.seen],
            "incidents_in_all": self.total,
            "problem": self.problem,
        }


class Watcher:
    """Stands in for `torch.compile` and `nn.Module.compile`."""

    def __init__(self) -> None:
        self.logs: list[Log] = []
        self.unwatched: dict[str, str] = {}
        self._twins: dict[int, Log] = {}
        self._compile = torch.compile
        self._compile_in_place = nn.Module.compile

    def install(self) -> None:
        in_place = self._compile_in_place

        @functools.wraps(self._compile)
        def compile(model: Any = None, **kwargs: Any) -> Any:
            return self._compiled(model, **kwargs)

        @functools.wraps(in_place)
        def compile_in_place(model: nn.Module, *args: Any, **kwargs: Any) -> None:
            log = self._log_of(model)
            in_place(model if log is None else log.twin, *args, **kwargs)
            if log is not None:
                wrap_compiled_call(log.twin, lambda call: _then(call, log.look))

        torch.compile = compile
        nn.Module.compile = compile_in_place  # pyright: ignore[reportAttributeAccessIssue]

    def finish(self) -> None:
        for log in self.logs:
            log.finish()

    def _compiled(self, model: Any = None, **kwargs: Any) -> Any:
        if model is None:
            return lambda model: self._compiled(model, **kwargs)
        if kwargs.get("disable"):
            return self._compile(model, **kwargs)
        if isinstance(model, nn.Module):
            log = self._log_of(uncompiled(model))
            if log is None:
                return self._compile(model, **kwargs)
            compiled: Any = self._compile(model if is_compiled_module(model) else log.twin, **kwargs)
            if not isinstance(compiled, nn.Module):  # what was compiled before comes back as a function
                return _then(compiled, log.look)
            compiled.register_forward_hook(lambda *_: None if torch.compiler.is_compiling() else log.look())
            return compiled
        if id(getattr(model, "__self__", None)) in self._twins:  # what nn.Module.compile comes with, of a twin
            return self._compile(model, **kwargs)
        return self._compiled_function(model, kwargs)

    def _compiled_function(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """A function, whose modules are known when it is first called: they are watched where they are."""
        owner = getattr(function, "__self__", None)
        logs: list[Log] = []
        if isinstance(owner, nn.Module):
            logs = self._watched_in_place([owner])
            function = getattr(owner, function.__name__, function)  # `forward` is another one now
        compiled = self._compile(function, **kwargs)
        is_known = bool(logs)

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_known
            if torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            if not is_known:
                is_known = True
                logs.extend(self._watched_in_place(self._modules_of(function, args, kwargs)))
            out = compiled(*args, **kwargs)
            for log in logs:
                log.look()
            return out

        return call

    def _modules_of(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
        reached = [*_named_in(function), *args, *kwargs.values()]
        owner = getattr(function, "__self__", args[0] if args else None)
        if isinstance(owner, nn.Module) and hasattr(type(owner), getattr(function, "__name__", "")):
            self.unwatched[type(owner).__name__] = "a method of it is compiled. Compile the module."
            reached = [one for one in reached if one is not owner]
        elif not isinstance(owner, (torch.Tensor, nn.Module)) and hasattr(owner, "__dict__"):
            reached += vars(owner).values()  # a trainer has its model in an attribute
        found = {id(one): one for one in reached if isinstance(one, nn.Module) and not is_compiled_module(one)}
        return [one for one in found.values() if next(one.parameters(), None) is not None]

    def _watched_in_place(self, modules: list[nn.Module]) -> list[Log]:
        logs = []
        for model in modules:
            log = self._log_of(model)
            if log is not None:
                logs.append(log)
                if type(model) is not type(log.twin):
                    # The twin shares all else with the model, and nobody can be handed the twin.
                    model.__class__ = type(log.twin)
        return logs

    def _log_of(self, model: nn.Module) -> Log | None:
        if id(model) in self._twins:
            return self._twins[id(model)]
        if any(model is part for log in self.logs for part in log.twin.modules()):
            return None  # watched as a part of another
        try:
            twin = watch(model, returns="output")
        except TorchGuardError as error:
            self.unwatched[type(model).__name__] = str(error)
            return None
        log = Log(model, twin)
        self._twins[id(model)] = self._twins[id(twin)] = log
        self.logs.append(log)
        return log


def _then(call: Callable[..., Any], look: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        if not torch.compiler.is_compiling():
            look()
        return out

    return called


def _named_in(function: Any) -> Iterator[Any]:
    """What a function reaches by name: variables around it, and globals."""
    function = getattr(function, "__func__", function)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
    if isinstance(code := getattr(function, "__code__", None), types.CodeType):
        scope = function.__globals__
        yield from (scope[name] for name in code.co_names if name in scope)
