"""`torchguard run --watch`: watches every model that a script compiles, without a change to the script.

Models that are not compiled are watched as well, as long as nothing is compiled: see `_eager_models.py`.

`Watcher` replaces `torch.compile` and `nn.Module.compile`. For a module it compiles `watch(module)`, a wrapper that
shares the module's parameters and attributes, and returns that. This does not work for a function that calls a model:
the function refers to the model itself, and which models it reaches is known only at its first call. These models get
the wrapper's class (`model.__class__ = ...`): the function then calls the watched `forward`, and the objects stay the
script's own. After each call, but not inside a graph, a `CallLog` reads the flags.
"""

import functools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchguard import err
from torchguard._channel.codes import ErrorCode
from torchguard._torch.modules import is_compiled_module, share_compiled_call, uncompiled, wrap_compiled_call
from torchguard._watch import watch
from torchguard.cli._eager_models import EagerModels
from torchguard.exceptions import TorchGuardError
from torchguard.flags import unpack_all

_MOST_INCIDENTS = 1_000  # of a model; more are counted, but not stored


@dataclass(frozen=True)
class CallIncident:
    """An incident, and the number of the call it happened in; the calls of a model are counted from 1."""

    call: int
    incident: Any

    def to_dict(self) -> dict[str, Any]:
        return {"call": self.call, "text": str(self.incident), **vars(self.incident)}


@dataclass(frozen=True)
class BackwardIncident:
    """A sample whose gradient became non-finite at a module, although its forward pass was finite."""

    sample: int
    code: int
    path: str

    def __str__(self) -> str:
        return f"sample {self.sample}: {ErrorCode.name(self.code)} at {self.path}, created in backward"


@dataclass(frozen=True)
class ParameterIncident:
    """Parameters that were non-finite before a call with bad samples, those nearest to the loss first.

    Attributes:
        finite_at: the last call in which they were known to be finite; 0 if they were not even in the first.
        bad: how many samples are bad in this call.
        size: of its batch.
    """

    parameters: tuple[str, ...]
    call: int
    finite_at: int
    bad: int
    size: int

    def __str__(self) -> str:
        first, *others = self.parameters
        more = f" and {len(others)} more" if others else ""
        samples = "every sample is bad" if self.bad == self.size else f"of {self.size} samples {self.bad} went bad"
        if not self.finite_at:
            since, remedy = "was non-finite before the first call", "Look at how weights are initialized or loaded."
        else:
            since = f"became non-finite between calls {self.finite_at} and {self.call}"
            remedy = "torchguard run --quarantine names the sample and the module whose gradient did that."
        return f"parameter {first}{more} {since}, and {samples}. {remedy}"


class CallLog:
    """The calls of one watched model, and their incidents. Reading flags never raises, and on a GPU never waits."""

    def __init__(self, model: Any, watched: Any) -> None:
        self.name, self.watched, self.labels = type(model).__name__, watched, watched._watch.labels
        self.model = model  # keeps it alive, so that its id stays unique
        self.calls = 0
        self.incidents: list[CallIncident] = []
        self.total_incidents = 0
        self.bad_samples: dict[int, int] = {}  # of each call on the CPU that had some
        self.retries: dict[int, str] = {}  # by the number of an incident: what `Retry` did in its step
        self._noted = 0
        self.problem = ""
        self._bad_calls: torch.Tensor | None = None  # stays on the device, and is read once at the end
        self._last_poll: Any = None
        self._bad_parameters: dict[str, int] = {}  # by name: the last call in which it was known to be finite
        self._named_parameters: set[str] = set()  # those that an incident names
        self._is_all_bad = False  # whether parameters made every sample of a call bad
        self._finite_at = 0  # the last call in which parameters were checked
        self._bad_backward_calls: set[int] = set()

    def read_flags(self) -> None:
        """Record the incidents of the call that just ended, and those of the backward pass before it."""
        try:
            if self.watched.flags is not None and self.watched.flags.is_cpu:
                self._read_backward_flags()
            self.calls += 1
            flags = self.watched.flags
            if flags is None:
                return
            is_bad = (flags != 0).any().to(torch.int64)
            self._bad_calls = is_bad if self._bad_calls is None else self._bad_calls.to(is_bad.device) + is_bad
            if flags.is_cpu:
                if is_bad:
                    self.bad_samples[self.calls] = int(err.is_err(flags).sum())
                if is_bad or self.calls == 1:
                    self._note_bad_parameters()
                self._record(self._blame_parameters(self.watched.report(), flags) if is_bad else [])
            elif (found := self.watched.poll()) is not self._last_poll:
                self._record(found or [])
                self._last_poll = found
        except Exception as error:  # a failure here must not end the script
            self._record_problem(error)

    def _read_backward_flags(self) -> None:
        """Record the faults that backward passes created since they were last read. On a GPU this waits."""
        flags = self.watched.backward_flags  # None without quarantine
        if flags is None or not bool((flags != 0).any()):
            return
        found = [
            BackwardIncident(sample, error.code, error.location_name)
            for sample, errors in enumerate(unpack_all(flags))
            for error in errors
        ]
        self._bad_backward_calls.add(self.calls)
        self._record(found)

    def _note_bad_parameters(self) -> None:
        """Check the parameters. They were used by the call that just ended."""
        for name, one in reversed([*self.watched.named_parameters()]):
            if name not in self._bad_parameters and not bool(one.detach().isfinite().all()):
                self._bad_parameters[name] = self._finite_at
        self._finite_at = self.calls

    def _blame_parameters(self, incidents: list[Any], flags: torch.Tensor) -> list[Any]:
        """Add the parameters that are non-finite and were not named before.

        Where every sample is bad, they are the cause of all incidents but those of the input. Those are left out, and
        from then on the parameters that go bad in turn.
        """
        is_bad = err.is_err(flags)
        new = {name: at for name, at in self._bad_parameters.items() if name not in self._named_parameters}
        self._named_parameters.update(new)
        if self._is_all_bad:
            new = {}
        named = [
            ParameterIncident(names, self.calls, at, int(is_bad.sum()), len(is_bad))
            for at in sorted({*new.values()})
            if (names := tuple(name for name, other in new.items() if other == at))
        ]
        if self._bad_parameters and bool(is_bad.all()):
            self._is_all_bad = True
            incidents = [one for one in incidents if one.path == "input"]
        return [*named, *incidents]

    def finish(self) -> None:
        """Read the flags of the last call, if no call was read or its flags were still being copied from the GPU."""
        try:
            self._read_backward_flags()
            if self.calls == 0 or (self.watched.flags is not None and not self.watched.flags.is_cpu):
                newest = self.watched.report()
                if newest != self._last_poll:
                    self._record(newest)
        except Exception as error:
            self._record_problem(error)

    @property
    def bad_calls(self) -> int:
        """The number of calls with a bad sample. On a GPU it may exceed the calls with a recorded incident."""
        counted = 0 if self._bad_calls is None else int(self._bad_calls)
        return max(counted + len(self._bad_backward_calls), len({one.call for one in self.incidents}))

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "calls": self.calls,
            "bad_calls": self.bad_calls,
            "incidents": [one.to_dict() for one in self.incidents],
            "total_incidents": self.total_incidents,
            "problem": self.problem,
        }

    def note_retry(self, what: str) -> None:
        """Note what `Retry` did about the incidents since it was last called."""
        for number in range(self._noted, len(self.incidents)):
            self.retries[number] = what
        self._noted = len(self.incidents)

    def _record(self, incidents: list[Any]) -> None:
        self.total_incidents += len(incidents)
        room = _MOST_INCIDENTS - len(self.incidents)
        self.incidents += [CallIncident(self.calls, one) for one in incidents[:room]]

    def _record_problem(self, error: Exception) -> None:
        self.problem = f"its flags could not be read: {type(error).__name__}: {error}"


class Watcher:
    """Replaces `torch.compile` and `nn.Module.compile`.

    Attributes:
        logs: one for each watched model.
        unwatched: the class of each model that is not watched, and the reason.
    """

    def __init__(self, quarantine: bool = False) -> None:
        self._quarantine = quarantine
        self.logs: list[CallLog] = []
        self.unwatched: dict[str, str] = {}
        self._log_by_id: dict[int, CallLog] = {}
        self._compile = torch.compile
        self._compile_in_place = nn.Module.compile
        self.eager_models = EagerModels(quarantine, self._new_log, self.unwatched)

    def install(self) -> None:
        in_place = self._compile_in_place

        @functools.wraps(self._compile)
        def compile(model: Any = None, **kwargs: Any) -> Any:
            return self._compile_watched(model, **kwargs)

        @functools.wraps(in_place)
        def compile_in_place(model: nn.Module, *args: Any, **kwargs: Any) -> None:
            self.eager_models.remove()
            log = self._log_of(model)
            in_place(model if log is None else log.watched, *args, **kwargs)
            if log is not None:
                wrap_compiled_call(log.watched, lambda call: _call_then(call, log.read_flags))
                share_compiled_call(log.watched, model)  # the script calls the plain model

        torch.compile = compile
        nn.Module.compile = compile_in_place  # pyright: ignore[reportAttributeAccessIssue]

    def finish(self) -> None:
        self.eager_models.finish()
        for log in {id(log): log for log in self._log_by_id.values()}.values():
            log.finish()

    def _compile_watched(self, model: Any = None, **kwargs: Any) -> Any:
        if model is None:
            return lambda model: self._compile_watched(model, **kwargs)
        if kwargs.get("disable"):
            return self._compile(model, **kwargs)
        if isinstance(model, nn.Module):
            self.eager_models.remove()  # what is compiled refers to its `__call__` from now on
            log = self._log_of(uncompiled(model))
            if log is None:
                return self._compile(model, **kwargs)
            compiled: Any = self._compile(model if is_compiled_module(model) else log.watched, **kwargs)
            if not isinstance(compiled, nn.Module):  # of a compiled model, torch.compile returns a function
                return _call_then(compiled, log.read_flags)
            compiled.register_forward_hook(lambda *_: None if torch.compiler.is_compiling() else log.read_flags())
            return compiled
        if id(getattr(model, "__self__", None)) in self._log_by_id:  # called by nn.Module.compile
            return self._compile(model, **kwargs)
        return self._compile_function(model, kwargs)

    def _compile_function(self, function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        """Compile a function. The modules it calls are known at its first call, and are then watched in place."""
        owner = getattr(function, "__self__", None)
        logs: list[CallLog] = []
        if isinstance(owner, nn.Module):
            logs = self._watch_in_place([owner])
            function = getattr(owner, function.__name__, function)  # the class changed, and with it `forward`
        compiled = self._compile(function, **kwargs)
        is_resolved = bool(logs)

        @functools.wraps(compiled)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_resolved
            if torch.compiler.is_compiling():
                return compiled(*args, **kwargs)
            if not is_resolved:
                is_resolved = True
                logs.extend(self._watch_in_place(self._modules_of(function, args, kwargs)))
            out = compiled(*args, **kwargs)
            for log in logs:
                log.read_flags()
            return out

        return call

    def _modules_of(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
        """The modules with parameters that a call of the function can reach."""
        reached = [*_values_reached_by(function), *args, *kwargs.values()]
        owner = getattr(function, "__self__", args[0] if args else None)
        if isinstance(owner, nn.Module) and hasattr(type(owner), getattr(function, "__name__", "")):
            self.unwatched[type(owner).__name__] = "one of its methods is compiled. Compile the module."
            reached = [one for one in reached if one is not owner]
        elif not isinstance(owner, (torch.Tensor, nn.Module)) and hasattr(owner, "__dict__"):
            reached += vars(owner).values()  # such as a trainer with a model in an attribute
        found = {id(one): one for one in reached if isinstance(one, nn.Module) and not is_compiled_module(one)}
        return [one for one in found.values() if next(one.parameters(), None) is not None]

    def _watch_in_place(self, modules: list[nn.Module]) -> list[CallLog]:
        """Give each module the class of its wrapper, which shares everything else with it."""
        logs = []
        for model in modules:
            log = self._log_of(model)
            if log is not None:
                logs.append(log)
                if type(model) is not type(log.watched):
                    model.__class__ = type(log.watched)
        return logs

    def _new_log(self, model: nn.Module, watched: Any) -> CallLog:
        log = CallLog(model, watched)
        self.logs.append(log)
        return log

    def _log_of(self, model: nn.Module) -> CallLog | None:
        """The log of a model, which is watched from now on; None if it cannot be, or is part of a watched model."""
        if id(model) in self._log_by_id:
            return self._log_by_id[id(model)]
        if any(model is part for log in self._log_by_id.values() for part in log.watched.modules()):
            return None
        try:
            watched = watch(model, returns="output", quarantine=self._quarantine)
        except TorchGuardError as error:
            self.unwatched[type(model).__name__] = str(error)
            return None
        log = self._log_by_id[id(model)] = self._log_by_id[id(watched)] = self._new_log(model, watched)
        return log


def _call_then(call: Callable[..., Any], callback: Callable[[], None]) -> Callable[..., Any]:
    """Call `callback` after each call, but not while Dynamo traces it."""

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        if not torch.compiler.is_compiling():
            callback()
        return out

    return called


def _values_reached_by(function: Any) -> Iterator[Any]:
    """The values of a function's closure variables and of the globals it names."""
    function = getattr(function, "__func__", function)
    for cell in getattr(function, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    if isinstance(code := getattr(function, "__code__", None), types.CodeType):
        scope = function.__globals__
        yield from (scope[name] for name in code.co_names if name in scope)
