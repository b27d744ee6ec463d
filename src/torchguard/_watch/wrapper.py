"""A model that watches itself: the same class, modules and parameters, and flags beside its output."""

import copyreg
import functools
import inspect
import math
import re
import types
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._channel.codes import ErrorCode
from torchguard._channel.record import push
from torchguard._pytrees import mapped, tensors_in
from torchguard._torch.modules import is_torch_leaf
from torchguard._torch.tracing import constant_in_graphs
from torchguard._watch.backward import NAN_MARK
from torchguard._watch.batch import batch_of
from torchguard._watch.call import Journal
from torchguard._watch.detect import index_evidence
from torchguard._watch.replace import looks_like_qkv, without_samples
from torchguard._watch.report import Incident, incidents_of
from torchguard._watch.state import MARKED, Watch
from torchguard.checks import can_be_looked_at, floats_of
from torchguard.flags import require_boundary

# Arguments that hold -Inf by right.
_MASK = re.compile("mask|bias", re.IGNORECASE)
# Modules that square what they are given, and sum so many squares where they do not say how many.
_SQUARING, _SQUARES = re.compile("norm", re.IGNORECASE), 2**20


class Watched:
    """What is added to the class of a watched model."""

    _watch: Watch
    _is_watched = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        forward = watch.own_forward or super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if watch.journal is not None:  # it calls itself
            return forward(*args, **kwargs)
        journal = watch.open(batch_of(args, kwargs, watch.batch_dim))
        args, kwargs = _taken_in(args, kwargs, journal, 0, watch.masks, stops=True)
        watch.journal = journal
        try:
            output = forward(*args, **kwargs)
        finally:
            watch.journal = None
        output = _put_out(self, output, journal, len(watch.paths) - 1)
        step = journal.close(watch.locations)
        watch.keep(step)
        if watch.quarantine:
            output = _without(step.told[0], output, journal)
        return output if watch.returns == "output" else (output, step.flags)

    @property
    def flags(self) -> Tensor | None:
        """The flags of the last call, where they are: nothing waits for the device."""
        step = self._watch.last_step()
        return step.flags if step else None

    @property
    def backward_flags(self) -> Tensor | None:
        """Faults born in backward passes since this was read last, for samples that were fine in their call.

        Has a row for each sample of the last call, or more if an earlier one was larger. Reading waits for the device.
        None without quarantine, and if the last call was larger than can be told of.
        """
        watch, step = self._watch, self._watch.last_step()
        if watch.marks is None or step is None or step.flags.shape[0] > MARKED:
            return None
        born, watch.born = watch.born, None
        if born is None:
            return torch.zeros_like(step.flags)
        last = born.any(0).nonzero().flatten()[-1:].tolist()
        rows = max([step.flags.shape[0], *(i + 1 for i in last)])
        born = born[:, :rows]
        f = step.flags.new_zeros(rows, step.flags.shape[1])
        for place in born.any(-1).nonzero().flatten().tolist():
            code = torch.where(born[place] >= NAN_MARK, ErrorCode.NAN, ErrorCode.INF)
            f = push(f, code, watch.ids[place], where=born[place] > 0)
        return f

    def report(self) -> list[Incident]:
        """What went wrong in the last call, sample by sample, with true paths: waits for the device."""
        require_boundary("report", "the flags")
        step = self._watch.last_step()
        return incidents_of(step, self._watch.names) if step else []

    def poll(self) -> list[Incident] | None:
        """The report of the newest call that can be had without waiting, None if there is none yet."""
        watch = self._watch
        return watch.poll.read(watch.last_step(), watch.names)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # All of `to`, `cuda`, `half` and the like come by here. What is no parameter has to follow.
        applied = super()._apply(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self._watch.place(self._watch.device)
        return applied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_watched(self._watch.model):  # it became one where it was, and nobody asked for another
            return _reduced_to_plain(self, super().__reduce_ex__(protocol))
        return new_shell, (type(self._watch.model), "forward" in self.__dict__), self.__dict__


def is_watched(model: object) -> bool:
    """Whether this is a watched model. By a mark: `Watched` is another class after a reload, and in a second import."""
    return getattr(type(model), "_is_watched", False)


# The names that a model loses by being watched.
NAMES = ("flags", "backward_flags", "report", "poll")


class Root:
    """A hook on the model itself, which the watched and the plain one share: it tells which of them is being called."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self.watch.was_called = is_watched(module)


class Eye:
    """The hooks of one watched module. They sleep unless the watched model is being called.

    Args:
        looks_after: at what the module puts out. Of a table that is not watched, only indices are looked at.
    """

    def __init__(self, watch: Watch, place: int, module: nn.Module, looks_after: bool) -> None:
        self.watch, self.place, self.masks, self.squares = watch, place, masks_of(module), squares_of(module)
        self.is_table = isinstance(module, nn.Embedding)
        self.looks_after = looks_after
        self.looks_before = watch.checks.indices if self.is_table else watch.quarantine
        # A gradient that goes bad in one of torch's own is stopped where it returns to what the module before put out.
        self.stops = not is_torch_leaf(module)
        self.in_place = looks_like_qkv(module)

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        journal = self.watch.journal
        if journal is None:
            journal = self.watch.journal_again()
            if journal is None:
                return None
        if self.is_table:
            if args:
                return (_clamped(args[0], module, journal, self.place), *args[1:]), kwargs
            return args, {**kwargs, "input": _clamped(kwargs["input"], module, journal, self.place)}
        if not journal.repairs:
            return None
        if len(args) == 1 and not kwargs and not self.masks and isinstance(args[0], Tensor):  # as most are
            return (journal.see(args[0], self.place, self.stops, True, self.squares),), kwargs
        return _taken_in(args, kwargs, journal, self.place, self.masks, self.stops, self.squares)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        journal = self.watch.journal
        if journal is None:
            journal = self.watch.journal_again()
            if journal is None:
                return None
        if isinstance(output, Tensor):
            output = journal.see(output, self.place, in_place=self.in_place)
        else:
            output = _put_out(module, output, journal, self.place)
        if journal.checks.others:
            for _, z in tensors_in(output):
                _remark(z, journal, self.place)
        return output


def masks_of(module: nn.Module) -> tuple[int, ...]:
    """Which positional arguments of a module are masks, by their names."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # not everything that can be called says how
        return ()
    return tuple(i for i, name in enumerate(names) if _MASK.search(name))


def squares_of(module: nn.Module) -> int:
    """How many squares of what it is given a module sums: a fault born there would be in its own gradient."""
    if not _SQUARING.search(type(module).__name__):
        return 0
    return math.prod(getattr(module, "normalized_shape", (_SQUARES,)))


def _taken_in(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    journal: Journal,
    place: int,
    masks: tuple[int, ...],
    stops: bool,
    squares: int = 0,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments as they go into a module: looked at, and in quarantine mended. Masks are taken as they are."""
    seen = tuple(v if i in masks else _seen(v, journal, place, stops, True, squares) for i, v in enumerate(args))
    named = {k: v if _is_mask(k) else _seen(v, journal, place, stops, True, squares) for k, v in kwargs.items()}
    return seen, named


def _put_out(module: Any, output: Any, journal: Journal, place: int) -> Any:
    """What a module puts out, looked at, and in quarantine mended."""
    if not isinstance(output, Tensor) and isinstance(module, nn.RNNBase):
        # Its states have the layers first, then the samples.
        states = _seen(output[1], journal, place, dim=1)
        return _seen(output[0], journal, place), states
    return _seen(output, journal, place)


@constant_in_graphs
def _is_mask(name: str) -> bool:
    return _MASK.search(name) is not None


def _seen(
    value: Any,
    journal: Journal,
    place: int,
    stops: bool = True,
    is_argument: bool = False,
    squares: int = 0,
    dim: int | None = None,
) -> Any:
    """A value of which every tensor has been seen."""
    if isinstance(value, Tensor):
        return journal.see(value, place, stops, is_argument, squares, dim)
    if journal.repairs:
        return mapped(value, lambda z: journal.see(z, place, stops, is_argument, squares, dim))
    for _, z in tensors_in(value):
        journal.see(z, place, stops, is_argument, squares, dim)
    return value


def _remark(z: Tensor, journal: Journal, place: int) -> None:
    if not can_be_looked_at(z) or journal.batch is None:
        return
    rows = journal.batch.rows_first(floats_of(z), journal.dim_of(z, None))
    if rows is None or rows.ndim < 2:
        return
    for check in journal.checks.others:
        found = check.look(rows.flatten(1))
        journal.remark(place, check.code, found.flatten(1).any(-1) if found.ndim > 1 else found)


def _clamped(ids: Any, table: Any, journal: Journal, place: int) -> Any:
    if not isinstance(ids, Tensor):
        return ids
    journal.note(place, index_evidence(ids, table.num_embeddings))
    return ids.clamp(0, table.num_embeddings - 1)


def _without(origin: Tensor, output: Any, journal: Journal) -> Any:
    """The output with zeros in the rows that went bad somewhere (-1: nowhere)."""

    def blank(z: Tensor) -> Tensor:
        is_plain = z.layout == torch.strided and not z.is_nested
        return without_samples(origin, z, journal.batch, journal.dim_of(z, None)) if is_plain else z

    return mapped(output, blank)


def _reduced_to_plain(shell: Any, reduced: Any) -> Any:
    """What a model that was made a watched one where it was is copied and pickled as: one of its own class."""
    shell_class = type(shell)
    base = shell_class.__bases__[1]
    make, given, *rest = reduced
    if make is copyreg.__newobj__:  # pickle would refuse it for another class  # pyright: ignore[reportAttributeAccessIssue]
        make = base.__new__
    if rest and isinstance(rest[0], dict):
        rest[0] = {name: value for name, value in rest[0].items() if value is not shell._watch}
    return make, tuple(base if one is shell_class else one for one in given), *rest


@functools.cache
def _shell_class(base: type[nn.Module], overrides: bool) -> type[nn.Module]:
    # Dynamo counts what it compiles by code object: each class has one of its own.
    plain = Watched.forward
    name = f"forward_of_{base.__name__}"
    code = plain.__code__.replace(co_name=name, co_qualname=name)
    forward = types.FunctionType(code, plain.__globals__, "forward", None, plain.__closure__)
    forward.__signature__ = inspect.signature(base.forward)  # pyright: ignore[reportFunctionMemberAccess]
    named: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__, "forward": forward}
    if overrides:
        # A `forward` that is set on the instance comes before a method, but not before a property.
        named |= {"_watched": forward, "forward": property(lambda self: self._watched)}
    return type(base.__name__, (Watched, base), named)


def new_shell(base: type[nn.Module], overrides: bool) -> nn.Module:
    """A model of that class that watches itself, to be given a state. One that `overrides` has its own `forward`."""
    return object.__new__(_shell_class(base, overrides))
