"""A model that watches itself: the same class, modules and parameters, and flags beside its output."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._torch import holds, is_in_backward, is_of_torch
from torchguard.checks import can_be_looked_at
from torchguard.errors.codes import ErrorCode
from torchguard.errors.gradient import over_rows
from torchguard.errors.query import is_ok
from torchguard.errors.record import push
from torchguard.flags import require_boundary
from torchguard.locations.tracking import LocationTable
from torchguard.nested import mapped, tensors_in
from torchguard.watching.checks import Checks
from torchguard.watching.incidents import Incident, Names, Poll, incidents_of
from torchguard.watching.journal import Journal, Step
from torchguard.watching.kinds import evidence, index_evidence, masked_kinds
from torchguard.watching.quarantine import NAN_MARK, repaired
from torchguard.watching.rows import Batch, batch_of

# So many samples of a batch can be told apart when a fault is born in the backward pass.
_MARKED = 4_096


class Watch:
    """How a model is watched, the journal of the call under way, and what the last call came to.

    Places are numbered: the input, the watched modules in the order of the model, the output.
    """

    def __init__(
        self, model: nn.Module, paths: tuple[str, ...], checks: Checks, quarantine: bool, returns: str, batch_dim: int
    ) -> None:
        self.model, self.paths, self.checks = model, paths, checks
        self.quarantine, self.returns, self.batch_dim = quarantine, returns, batch_dim
        self.table = LocationTable(type(model).__name__, paths, ())
        self.locations = tuple(self.table.locate(path).id for path in paths)
        messages = {check.code: check.message for check in checks.others}
        self.names = Names(tuple(path or type(model).__name__ for path in paths), messages)
        self.journal: Journal | None = None
        self.was_called = False  # by the watched model, not by the plain one
        self.step: Step | None = None
        self.poll = Poll()
        self.marks: Tensor | None = None
        self.place_marks(self.device)

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def journal_now(self) -> Journal | None:
        """The journal of the call under way. When a checkpoint runs a part again in backward, one that nobody reads."""
        if self.journal is None and self.quarantine and self.was_called and is_in_backward():
            return Journal(None, repairs=True)
        return self.journal

    def place_marks(self, device: torch.device) -> None:
        """Leaves, one for each place and sample, whose gradient tells of faults born in the backward pass."""
        if self.quarantine:
            self.marks = torch.zeros(len(self.paths), _MARKED, device=device, requires_grad=True)

    def open(self, batch: Batch) -> Journal:
        # The model may have been moved by its plain twin. A leaf cannot be made in a graph: there it does without.
        if self.marks is not None and self.marks.device != batch.device and not torch.compiler.is_compiling():
            self.place_marks(batch.device)
        has_marks = self.marks is not None and self.marks.device == batch.device and torch.is_grad_enabled()
        marks = self.marks[:, : batch.size] if has_marks and holds(batch.size <= _MARKED) else None  # pyright: ignore[reportOptionalSubscript]
        return Journal(batch, self.quarantine, marks)

    def __getstate__(self) -> dict[str, Any]:
        where = self.marks.device if self.marks is not None else None
        return {**self.__dict__, "journal": None, "step": None, "poll": Poll(), "marks": where}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.locations = tuple(self.table.locate(path).id for path in self.paths)
        self.place_marks(state["marks"])  # of the model itself nothing may be there yet


class Watched:
    """What is added to the class of a watched model."""

    _watch: Watch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._watched(super().forward, args, kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def _watched(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        watch = self._watch
        journal = watch.open(batch_of(args, kwargs, watch.batch_dim))
        args, kwargs = _seen((args, kwargs), watch, journal, 0)
        watch.journal = journal
        try:
            output = forward(*args, **kwargs)
        finally:
            watch.journal = None
        output = _seen(output, watch, journal, len(watch.paths) - 1)
        watch.step = journal.close(watch.locations)
        if watch.quarantine:
            output = _without(watch.step.origin >= 0, output, journal.batch)
        return output if watch.returns == "output" else (output, watch.step.flags)

    @property
    def flags(self) -> Tensor | None:
        """The flags of the last call, where they are: nothing waits for the device."""
        return self._watch.step.flags if self._watch.step else None

    @property
    def backward_flags(self) -> Tensor | None:
        """Faults born in backward passes since this was read last, for samples that were fine before.

        Reading waits for the device. None without quarantine.
        """
        watch = self._watch
        if watch.marks is None or watch.step is None:
            return None
        flags = watch.step.flags
        f = torch.zeros_like(flags)
        if watch.marks.grad is None:
            return f
        born = watch.marks.grad[:, : flags.shape[0]] * is_ok(flags)
        watch.marks.grad = None
        for place in born.any(-1).nonzero().flatten().tolist():
            code = torch.where(born[place] >= NAN_MARK, ErrorCode.NAN, ErrorCode.INF)
            f = push(f, code, watch.locations[place], where=born[place] > 0)
        return f

    def report(self) -> list[Incident]:
        """What went wrong in the last call, sample by sample, with true paths: waits for the device."""
        require_boundary("report", "the flags")
        return incidents_of(self._watch.step, self._watch.names) if self._watch.step else []

    def poll(self) -> list[Incident] | None:
        """The report of the newest call that can be had without waiting, None if there is none yet."""
        watch = self._watch
        return watch.poll.read(watch.step, watch.names)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # All of `to`, `cuda`, `half` and the like come by here. The marks are no parameter and have to follow.
        applied = super()._apply(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self._watch.place_marks(self._watch.device)
        return applied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return new_shell, (type(self._watch.model), "forward" in self.__dict__), self.__dict__


class WatchedOverride(Watched):
    """The same for a model that has a `forward` of its own, set on the instance: that would come before the class's."""

    @property
    def forward(self) -> Callable[..., Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._watched_override

    def _watched_override(self, *args: Any, **kwargs: Any) -> Any:
        return self._watched(self.__dict__["forward"], args, kwargs)


class Root:
    """A hook on the model itself, which the watched and the plain one share: it tells which of them is being called."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self.watch.was_called = isinstance(module, Watched)


class Eye:
    """The hooks of one watched module. They sleep unless the watched model is being called."""

    def __init__(self, watch: Watch, place: int) -> None:
        self.watch, self.place = watch, place

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        journal = self.watch.journal_now()
        if journal is None:
            return None
        if isinstance(module, nn.Embedding) and args:
            return (_clamped(args[0], module.num_embeddings, journal, self.place), *args[1:]), kwargs
        if not journal.repairs:
            return None
        # In the backward pass of one of torch's own modules nothing is born: the look at what returned into it will do.
        stops = not is_of_torch(module)
        args = mapped(args, lambda z: _mended(z, journal, self.place, None, stops))
        return args, mapped(kwargs, lambda z: _mended(z, journal, self.place, None, stops)) if kwargs else kwargs

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        journal = self.watch.journal_now()
        if journal is None:
            return None
        for _, z in tensors_in(output) if self.watch.checks.others else ():
            _remark(z, self.watch, journal, self.place)
        if isinstance(module, nn.RNNBase):  # whose states have the layers first, then the samples
            states = _seen(output[1], self.watch, journal, self.place, dim=1)
            return _seen(output[0], self.watch, journal, self.place), states
        return _seen(output, self.watch, journal, self.place)


def _seen(value: Any, watch: Watch, journal: Journal, place: int, dim: int | None = None) -> Any:
    """Note what the tensors in a value hold; in quarantine, the value with what is bad replaced."""
    if journal.repairs:
        return mapped(value, lambda z: _mended(z, journal, place, dim, stops=True))
    if watch.checks.nan or watch.checks.inf:
        for z in [value] if isinstance(value, Tensor) else [z for _, z in tensors_in(value)]:
            if can_be_looked_at(z):
                found = masked_kinds(evidence(z), watch.checks.nan, watch.checks.inf)
                journal.note(place, found, journal.dim_of(z, dim))
    return value


def _mended(z: Tensor, journal: Journal, place: int, dim: int | None, stops: bool) -> Tensor:
    if not can_be_looked_at(z):
        return z
    dim = journal.dim_of(z, dim)
    z, found = repaired(z, journal.batch, journal.marks, place, dim, stops)
    if found is not None:
        journal.note(place, found, dim)
    journal.dim_of(z, dim)
    return z


def _remark(z: Tensor, watch: Watch, journal: Journal, place: int) -> None:
    rows = journal.batch.rows_first(z.detach()) if can_be_looked_at(z) and journal.batch else None
    if rows is None or rows.ndim < 2:
        return
    for check in watch.checks.others:
        found = check.look(rows.flatten(1))
        journal.remark(place, check.code, found.flatten(1).any(-1) if found.ndim > 1 else found)


def _clamped(ids: Any, size: int, journal: Journal, place: int) -> Any:
    if not isinstance(ids, Tensor):
        return ids
    journal.note(place, index_evidence(ids, size))
    return ids.clamp(0, size - 1)


def _without(bad: Tensor, output: Any, batch: Batch) -> Any:
    """The output with zeros in the rows that are bad."""

    def blank(z: Tensor) -> Tensor:
        if not can_be_looked_at(z) or z.ndim <= batch.dim or not holds(z.shape[batch.dim] == batch.size):
            return z
        return torch.where(over_rows(bad, z).movedim(0, batch.dim) if batch.dim else over_rows(bad, z), 0, z)

    return mapped(output, blank)


@functools.cache
def _shell_class(base: type[nn.Module], watched: type[Watched]) -> type[nn.Module]:
    return type(base.__name__, (watched, base), {"__module__": base.__module__, "__doc__": base.__doc__})


def new_shell(base: type[nn.Module], overrides: bool) -> nn.Module:
    """A model of that class that watches itself, to be given a state."""
    return object.__new__(_shell_class(base, WatchedOverride if overrides else Watched))
