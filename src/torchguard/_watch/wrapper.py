"""The watched model: it is an instance of the model's class, shares its attributes, and returns `(out, f)`."""

import copyreg
import functools
import inspect
import types
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._channel.codes import ErrorCode
from torchguard._channel.record import push
from torchguard._operators import use_operators
from torchguard._pytrees import OBJECTS, map_tensors, tensors_in
from torchguard._torch.modules import compiled_call_at, has_compiled_parts, without_compiled_call
from torchguard._torch.tensors import is_distributed, map_local, register_tuple
from torchguard._torch.tracing import in_transform, is_exporting, is_plain, is_surely
from torchguard._torch.uncompiled import python_control_flow
from torchguard._watch.arguments import IDS, batch_of, checked_ids, form_of
from torchguard._watch.batch import MIXED, Batch
from torchguard._watch.call import CallRecord
from torchguard._watch.call_summary import CallSummary
from torchguard._watch.detect import PROBE_NAN
from torchguard._watch.export import plan_of_transform
from torchguard._watch.finite_derivatives import finite_arguments, refuse_nested_forward_mode, with_finite_derivatives
from torchguard._watch.finite_gradients import (
    require_finite_gradients,
    require_in_graph,
    require_of_module,
    with_overflowed_gradients,
)
from torchguard._watch.graph_plan import codes_of_graph, mark_arguments
from torchguard._watch.hooks import checked_inputs, checked_output
from torchguard._watch.parameter_uses import UseMode
from torchguard._watch.parts import without_compiled_parts
from torchguard._watch.plan import NOTHING_KNOWN, OwnerPlan, PlannedCall, can_follow
from torchguard._watch.report import Incident, incidents_of
from torchguard._watch.run_report import RunReport, incident_of, run_report, with_causes
from torchguard._watch.state import MAX_PROBED_BATCH, NoLongerWatched, WatchState
from torchguard._watch.warn import warn_of_recurrent_layer, warn_of_unfollowed, warn_once_of_mixing
from torchguard._watch.zeros import zero_samples
from torchguard.exceptions import ReturnsError, WatchError
from torchguard.flags import require_boundary

# The public names that a watched model adds to those of its class.
ADDED_NAMES = ("flags", "backward_flags", "history", "report", "run_report", "poll")


class WatchedModel:
    """What is added to the class of a watched model."""

    _watch: WatchState = NoLongerWatched()  # pyright: ignore[reportAssignmentType]
    _is_watched = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        watch = self._watch
        forward = watch.instance_forward or super().forward  # pyright: ignore[reportAttributeAccessIssue]
        if watch.call_record is not None:  # the model calls itself
            return forward(*args, **kwargs)
        if watch.quarantine and in_transform():
            refuse_nested_forward_mode()
        ids = None if watch.takes_ids else kwargs.pop(IDS, None)
        batch = batch_of(args, kwargs, watch.batch_dim)
        if can_follow() and batch.size > (0 if watch.quarantine else 1):
            output, call_record, codes = self._call_with_plan(forward, args, kwargs, batch)
        elif watch.export_plan is not None and is_exporting():
            output, call_record, codes = self._call_planned(forward, args, kwargs, batch, watch.export_plan)
        elif watch.quarantine and not torch.compiler.is_compiling() and in_transform():
            plan = plan_of_transform(self, args, kwargs)
            output, call_record, codes = self._call_planned(forward, args, kwargs, batch, plan)
        else:
            call_record = watch.new_record(batch)
            output, codes = self.forward_of_model(forward, args, kwargs, call_record), None
            if use_operators() and not is_surely(batch.size < (1 if watch.quarantine else 2)):
                codes = codes_of_graph(watch, call_record, output)
            elif watch.quarantine and not is_surely(batch.size < 2):
                warn_of_unfollowed(watch)
                call_record.set_rows([MIXED] * len(call_record.statuses))
                codes = [MIXED] * len(tensors_in(output, objects=OBJECTS))
        mixes = watch.quarantine and codes is not None and MIXED in codes
        ids = None if ids is None else checked_ids(ids, batch)
        summary = call_record.summarize(watch.location_ids, mixes, watch.history.table_on(batch.device), ids)
        if watch.quarantine and not summary.is_clean and call_record.has_fault_for_all():
            warn_of_recurrent_layer(watch)
        if call_record.needs_finite_gradients:
            flags = require_in_graph(summary.flags, watch.history.handle)
            summary = CallSummary(flags, *summary[1:])  # torch 2.11 cannot store what `_replace` returns
        if not is_exporting():  # nothing of the call outlives the trace
            summary = watch.history.record(summary, ids)
            watch.save(summary)
        if watch.quarantine:
            output = _without_bad_samples(summary.origins[0], output, call_record, codes)
        return output if watch.returns == "output" else returned(output, summary.flags)

    def forward_of_model(
        self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call_record: CallRecord
    ) -> Any:
        """Call the model with all its checks. By its name, its frame counts as the model's: see `cli/_views.py`."""
        watch = self._watch
        if use_operators():
            mark_arguments(args, kwargs, call_record.batch)
        is_finite = watch.quarantine and torch.compiler.is_compiling() and not is_exporting() and in_transform()
        args, kwargs = finite_arguments((args, kwargs)) if is_finite else (args, kwargs)
        args, kwargs = checked_inputs(args, kwargs, call_record, watch)
        around = nullcontext() if torch.compiler.is_compiling() else python_control_flow()
        watch.begin(call_record)
        try:
            with with_finite_derivatives(self) if is_finite else around:  # pyright: ignore[reportArgumentType]
                output = forward(*args, **kwargs)
        finally:
            watch.end(call_record)
        if isinstance(output, Iterator):
            raise WatchError(
                f"watch: {type(watch.model).__name__} returned an iterator. What it yields is computed after the call, "
                "and would not be checked. Return a list, or watch the module that computes each item."
            )
        return checked_output(self, output, call_record, len(watch.paths) - 1)

    def _call_with_plan(
        self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch
    ) -> tuple[Any, CallRecord, Sequence[int]]:
        """Call the model in eager mode: the output, the record of the call, and the row codes of the outputs."""
        watch = self._watch
        form = form_of(watch.model, args, kwargs)
        shows_all = watch.quarantine or not has_compiled_parts(watch.model)
        owners = watch.plans.start(form, watch.model, args, kwargs, batch, shows_all)
        call_record = watch.new_record(batch, owners)
        protects = watch.quarantine and torch.is_grad_enabled()
        uses = UseMode(owners, call_record) if protects else nullcontext()
        if protects and any(map(is_distributed, watch.model.parameters())):
            call_record.has_distributed = True
            require_of_module(watch, watch.model)
        with without_compiled_parts(watch), owners.running(), uses:
            output = self.forward_of_model(forward, args, kwargs, call_record)
        plan = watch.plans.finish(form, owners, output)
        if protects and plan.needs_hooks:
            require_finite_gradients(watch)
        if watch.quarantine and plan.mixes and batch.size > 1:
            warn_once_of_mixing(watch, plan.problem)
        return output, call_record, plan.outputs

    def _call_planned(
        self, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch, plan: OwnerPlan | None
    ) -> tuple[Any, CallRecord, Sequence[int]]:
        """The same in an export or under a transform, with the plan that was found for it.

        Without one, samples count as mixed.
        """
        watch, is_export = self._watch, is_exporting()
        planned = PlannedCall(plan or NOTHING_KNOWN, compares=False, protects_all=not is_export)
        call_record = watch.new_record(batch, planned)
        uses = nullcontext() if is_export else UseMode(planned, call_record)
        with without_compiled_parts(watch), uses:
            output = self.forward_of_model(forward, args, kwargs, call_record)
        codes = planned.finish(output).outputs
        if not is_export and MIXED in codes and batch.size > 1:
            warn_once_of_mixing(watch, NOTHING_KNOWN.problem if plan is None else plan.problem)
        return output, call_record, codes

    @property
    def flags(self) -> Tensor | None:
        """The flags of the last call, on their device: reading them waits for nothing."""
        summary = self._watch.last_summary()
        return summary.flags if summary else None

    @property
    def backward_flags(self) -> Tensor | None:
        """Faults created in backward since this was read last, for samples that were finite in their call.

        Has a row for each sample of the last call, or more if an earlier call was larger. Reading waits for the device.
        None without quarantine, and if the last call had more than 4,096 samples.

        Where the gradient of a parameter is not finite now, all samples are flagged at the module of the parameter: the
        product of finite activations and finite gradients overflowed, or their sum.
        """
        watch, summary = self._watch, self._watch.last_summary()
        if watch.probes is None or summary is None or summary.flags.shape[0] > MAX_PROBED_BATCH:
            return None
        faults, watch.backward_faults = watch.backward_faults, None
        if faults is None:
            return with_overflowed_gradients(torch.zeros_like(summary.flags), watch, summary)
        last = faults.any(0).nonzero().flatten()[-1:].tolist()
        rows = max([summary.flags.shape[0], *(i + 1 for i in last)])
        faults = faults[:, :rows]
        f = summary.flags.new_zeros(rows, summary.flags.shape[1])
        for location in faults.any(-1).nonzero().flatten().tolist():
            code = torch.where(faults[location] >= PROBE_NAN, ErrorCode.NAN, ErrorCode.INF)
            f = push(f, code, watch.ids[location], where=faults[location] > 0)
        return with_overflowed_gradients(f, watch, summary)

    def report(self) -> list[Incident]:
        """The incidents of the last call, sample by sample, each with its full path. Waits for the device.

        Where every sample went bad at a module that has a non-finite parameter, `incident.cause` names it, and the step
        since which every sample is bad there.
        """
        require_boundary("report", "the flags")
        watch, summary = self._watch, self._watch.last_summary()
        if summary is None:
            return []
        incidents = incidents_of(summary, watch.labels)
        return with_causes(incidents, len(summary.flags), self, watch.history, watch.labels)

    @property
    def history(self) -> list[Incident]:
        """The faults of all calls so far: step, sample, id, origin and code. Waits for the device.

        Steps count the calls of the watched model from 0. Of more than 1,024 faults, the first 512 and the last 512
        are kept. `guarded.run_report()` counts them.
        """
        require_boundary("history", "the flags")
        return [incident_of(entry, self._watch.labels) for entry in self._watch.history.entries()[0]]

    def run_report(self) -> RunReport:
        """What happened in all calls so far, by origin, and which parameters are not finite. Waits for the device."""
        require_boundary("run_report", "the flags")
        watch = self._watch
        return run_report(watch.history, watch.labels, self)

    def poll(self) -> list[Incident] | None:
        """The report of the newest call that can be read without waiting; None if there is none yet."""
        watch = self._watch
        return watch.poll.read(watch.last_summary(), watch.labels)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        # `to`, `cuda`, `half` and the like all call this. The tensors of the state are no parameters but have to move.
        applied = super()._apply(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        self._watch.allocate(self._watch.device)
        return applied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_watched(self._watch.model):  # its class was changed in place, and there is no plain model beside it
            return _reduced_to_plain(self, super().__reduce_ex__(protocol))
        attributes = without_compiled_call(self.__dict__)
        return new_wrapper, (type(self._watch.model), "forward" in self.__dict__), attributes


def is_watched(model: object) -> bool:
    """Whether this is a watched model. Not by `isinstance`: a reload or second import makes another `WatchedModel`."""
    return getattr(type(model), "_is_watched", False)


class RootHook:
    """A hook on the model itself, which the watched and the plain model share: it records which of them is called."""

    def __init__(self, watch: WatchState) -> None:
        self.watch = watch

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.compiler.is_compiling():
            self.watch.was_called = is_watched(module)
            self.watch.running.summary_before = self.watch.summary

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Refuse a result that was not checked: of a `forward` that was set on the model after `watch`."""
        # Not `is_watched`: Dynamo would compile it as a frame of its own.
        if torch.compiler.is_compiling() or not getattr(type(module), "_is_watched", False):
            return
        watch = self.watch
        if watch.summary is watch.running.summary_before and watch.call_record is None and not in_transform():
            raise WatchError(
                f"watch: the `forward` of this {type(module).__name__} was replaced after watch, and what it returned "
                "is not checked. To compile: torch.compile(guarded) or guarded.compile(). Or set `forward` first."
            )
        watch.running.summary_before = None


def _without_bad_samples(origin: Tensor, output: Any, call_record: CallRecord, codes: Sequence[int] | None) -> Any:
    """The output with zeros in samples that have an origin (-1: none).

    Args:
        codes: the row codes of the tensors in the output; None if sizes decide.
    """
    zeroed: list[Tensor] = []

    def zero(z: Tensor) -> Tensor:
        rows = None if codes is None else codes[len(zeroed)]
        is_dense = z.layout == torch.strided and not z.is_nested
        if is_distributed(z):
            zeroed.append(map_local(z, lambda part: zero_samples(origin, part, call_record.batch, MIXED)))
        else:
            zeroed.append(zero_samples(origin, z, call_record.batch, rows) if is_dense else z)
        return zeroed[-1]

    return map_tensors(output, zero, OBJECTS)


def _reduced_to_plain(wrapper: Any, reduced: Any) -> Any:
    """What a model whose class was changed in place is copied and pickled as: an instance of its own class."""
    wrapper_class = type(wrapper)
    base = wrapper_class.__bases__[1]
    make, arguments, *rest = reduced
    if make is copyreg.__newobj__:  # pickle would refuse it for another class  # pyright: ignore[reportAttributeAccessIssue]
        make = base.__new__
    if rest and isinstance(rest[0], dict):
        rest[0] = {name: value for name, value in rest[0].items() if value is not wrapper._watch}
    return make, tuple(base if one is wrapper_class else one for one in arguments), *rest


def _generation_call(self: Any) -> Any:
    if self._watch.generation_call is None:
        raise AttributeError("_compiled_call")  # `generate` asks whether there is one
    return self._watch.generation_call


def _set_generation_call(self: Any, call: Any) -> None:
    self._watch.generation_call = call


@functools.cache
def _wrapper_class(base: type[nn.Module], has_instance_forward: bool) -> type[nn.Module]:
    # Dynamo limits recompiles by code object: each class gets one of its own.
    plain = WatchedModel.forward
    name = f"forward_of_{base.__name__}"
    code = plain.__code__.replace(co_name=name, co_qualname=name)
    forward = types.FunctionType(code, plain.__globals__, "forward", None, plain.__closure__)
    forward.__signature__ = inspect.signature(base.forward)  # pyright: ignore[reportFunctionMemberAccess]
    named: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__, "forward": forward}
    named |= compiled_call_at("_watch")
    if hasattr(base, "get_compiled_call"):  # `generate` of transformers stores what it compiles on the model
        named["_compiled_call"] = property(_generation_call, _set_generation_call)
    if has_instance_forward:
        # A `forward` in the instance's `__dict__` takes precedence over a method, but not over a property.
        named |= {"_watched": forward, "forward": property(lambda self: self._watched)}
    return type(base.__name__, (WatchedModel, base), named)


def new_wrapper(base: type[nn.Module], has_instance_forward: bool) -> nn.Module:
    """A watched model of that class, without attributes yet.

    Args:
        has_instance_forward: whether the model has a `forward` that is set on the instance.
    """
    return object.__new__(_wrapper_class(base, has_instance_forward))


# The pair (out, f).
#
# Callers that know nothing of `watch` (a training loop, `generate`, a pipeline) expect the model's own output. They
# fail at the pair with errors such as "cross_entropy_loss(): argument 'input' must be Tensor, not tuple", which do not
# say what to do. So in eager mode the pair is a tuple that names the remedy when it is used as an output. In a graph,
# and under transforms, it is a plain tuple.

# What a tensor can do and a tuple cannot, or does in another way: a tuple times 2 is twice as long.
_OPERATIONS = ("neg", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "matmul", "rmatmul", "float")


class WatchedOutput(tuple):
    """`(out, f)`, which unpacks, indexes and compares as a tuple does. To use it as `out` is an error."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise _error(f"it has no attribute {name!r}")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, slice)):
            return (*self,)[key]  # before torch 2.13, Dynamo cannot trace tuple.__getitem__
        raise _error(f"it has no item {key!r}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _error(f"{getattr(function, '__name__', function)} does not take it")


def _refusing(name: str) -> Any:
    def refuse(self: WatchedOutput, *_: Any) -> Any:
        raise _error(f"it has no {name}")

    return refuse


for _name in _OPERATIONS:
    setattr(WatchedOutput, f"__{_name}__", _refusing(f"__{_name}__"))
register_tuple(WatchedOutput)


def _error(what: str) -> ReturnsError:
    return ReturnsError(
        f"watch: the watched model returned the tuple (out, f), and {what}. Unpack it, `out, f = guarded(...)`. For "
        "callers that expect the model's own output: watch(model, returns='output'), with the flags in guarded.flags."
    )


def returned(output: Any, flags: Tensor) -> tuple[Any, Tensor]:
    """The pair that a call returns."""
    return WatchedOutput((output, flags)) if is_plain(flags) else (output, flags)
