"""The state of a watched model: how it is watched, the call that is running, and the summary of the last one."""

import itertools
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._operators import use_operators
from torchguard._torch.dynamo import keep_static
from torchguard._torch.settings import allow_side_effects_under_checkpoint
from torchguard._torch.tracing import holds, in_transform, is_exporting, is_in_backward
from torchguard._watch import report
from torchguard._watch.arguments import IDS
from torchguard._watch.batch import Batch
from torchguard._watch.call import CallRecord
from torchguard._watch.call_summary import CallSummary
from torchguard._watch.finite_gradients import register_state
from torchguard._watch.gradient_probes import region_probes
from torchguard._watch.history import History
from torchguard._watch.parts import enter_call, leave_call
from torchguard._watch.plan import Call, OwnerPlan, Plans
from torchguard._watch.select import Checks, argument_names, norm_widths
from torchguard.exceptions import WatchError
from torchguard.locations._tracked import LocationTable

# The largest batch for which faults created in backward are recorded.
MAX_PROBED_BATCH = 4_096
# A copy of a watched model has the key of its original.
_KEYS = itertools.count()


class Running(threading.local):
    """What one thread does with a watched model, in eager mode.

    Dynamo reads attributes of a `threading.local`, with a guard, but does not write them: a call in a graph is noted in
    `WatchState.traced_record` instead, which has a value while Dynamo traces and at no other time.
    """

    # Runs once in each thread. (Dynamo of torch 2.11 reads defaults of the class, if there are any, instead of values.)
    def __init__(self) -> None:
        self.call_record: CallRecord | None = None
        self.summary: CallSummary | None = None
        self.summary_before: CallSummary | None = None  # that of the model when this call of it began


class WatchState:
    """How a model is watched, the record of the call that is running, and the summary of the last one.

    Args:
        paths: the locations: "input", the paths of the watched modules in the order of the model, and "" for the
            output. Everywhere else a location is given by its index in it.
        masks: which positional arguments of the model are attention masks.
        regions: the locations of each block that may be compiled once.
        asks_for_regions: whether the user said so.
        sample_of: by location, the dim along which the samples lie, as the user said.
    """

    def __init__(
        self,
        model: nn.Module,
        paths: tuple[str, ...],
        checks: Checks,
        quarantine: bool,
        returns: str,
        batch_dim: int,
        masks: tuple[int, ...],
        regions: tuple[range, ...],
        asks_for_regions: bool,
        sample_of: dict[int, int],
    ) -> None:
        self.model, self.paths, self.checks, self.masks = model, paths, checks, masks
        self.quarantine, self.returns, self.batch_dim, self.sample_of = quarantine, returns, batch_dim, sample_of
        self.location_table = LocationTable(type(model).__name__, paths, ())
        messages = {check.code: check.message for check in checks.others}
        self.positional, keyword_only = argument_names(model)
        names = (*self.positional, *keyword_only)
        # What an origin can be: a location, an argument of the module there, or an argument of the model.
        self.arguments = {name: 2 * len(paths) + i for i, name in enumerate(names)}
        self.takes_ids = IDS in self.arguments
        labels = tuple(path or type(model).__name__ for path in paths)
        given = (*("" for _ in paths), *names)
        self.labels = report.Labels(
            (*labels, *labels, *(labels[0] for _ in names)), (*(None for _ in paths), *given), messages
        )
        self.history = History()
        self.instance_forward = model.__dict__.get("forward")  # some tools set it on the instance
        self.key = next(_KEYS)
        self.running = Running()
        self.traced_record: CallRecord | None = None
        self.compiled_call: Any = None  # what `compile()` of the watched model made
        self.generation_call: Any = None  # what its `generate()` made
        self.regions, self.asks_for_regions, self.norm_widths = regions, asks_for_regions, norm_widths(model)
        self.has_no_regions = False  # whether torch could not compile blocks once: see `regions.py`
        self.was_called = False  # whether the last call was one of the watched model, not of the plain one
        self.summary: CallSummary | None = None
        self.is_summary_lost = self.is_summary_of_graph = False
        self.poll = report.Poll()
        self.plans = Plans()
        self.export_plan: OwnerPlan | None = None  # while `export.py` exports the model
        self.warned: set[str] = set()  # what the user was told of the model: see `warn.py`
        self.has_half = False  # whether a call ran in float16
        self.gradient_hooks: dict[int, Any] = {}  # by id of the parameter: see `finite_gradients.py`
        self.allocate(self.device)

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    @property
    def call_record(self) -> CallRecord | None:
        """The record of the call that this thread is in."""
        return self.running.call_record if self.traced_record is None else self.traced_record

    def begin(self, call_record: CallRecord) -> None:
        """Begin a call in this thread."""
        if call_record.in_graph:
            self.traced_record = call_record
        else:
            self.running.call_record = call_record
            enter_call(self.key, call_record)

    def end(self, call_record: CallRecord) -> None:
        """End a call. One that began in a graph may end outside of it, after a graph break."""
        if call_record.in_graph:
            self.traced_record = None
        else:
            self.running.call_record = None
            leave_call(self.key)

    def record_for_recompute(self) -> CallRecord | None:
        """A record that is never read, if no call is running but a checkpoint recomputes a part of one in backward."""
        if self.quarantine and self.was_called and is_in_backward():
            call_record = CallRecord(None, self.checks, True, len(self.paths))
            call_record.recomputed = self
            return call_record
        return None

    def allocate(self, device: torch.device) -> None:
        """Make the tensors that a call needs, on a device.

        `location_ids` has `[locations | the same, for arguments of modules | arguments of the model | 0 for none]`, as
        an origin counts them. It is a tensor: with ids as constants, every model would be compiled anew. `probes` are
        the gradient probes, see `gradient_probes.py`.
        """
        self.ids = tuple(self.location_table.locate(path).id for path in self.paths)
        of_arguments = [self.ids[0]] * len(self.arguments)
        self.location_ids = keep_static(torch.tensor([*self.ids, *self.ids, *of_arguments, 0], device=device))
        self.history.allocate(device)
        register_state(self.history.number, self)
        self.probes: Tensor | None = None
        self.backward_faults: Tensor | None = None  # the gradients of the probes since they were read last
        if self.quarantine:
            self.probes = keep_static(torch.zeros(len(self.paths), MAX_PROBED_BATCH, device=device, requires_grad=True))
            state = weakref.ref(self)
            self.probes.register_post_accumulate_grad_hook(lambda probes: _save_probe_gradient(state(), probes))

    def new_record(self, batch: Batch, owners: Call | None = None) -> CallRecord:
        # The plain model may have been moved. A leaf cannot be made in a graph: there the call goes without probes.
        if self.location_ids.device != batch.device and not torch.compiler.is_compiling():
            self.allocate(batch.device)
        # An export goes without probes, too: asking for the size of its batch would limit it.
        can_probe = self.probes is not None and torch.is_grad_enabled() and not is_exporting()
        probes = self.probes if can_probe and holds(batch.size <= MAX_PROBED_BATCH) else None
        if probes is not None:
            probes = probes.view_as(probes) if probes.device == batch.device else None  # a view for this call alone
        record = CallRecord(
            batch, self.checks, self.quarantine, len(self.paths), probes, owners, self.sample_of, self.norm_widths
        )
        if self.asks_for_regions and probes is not None and use_operators():
            record.region_probes = region_probes(probes, batch.size, self.regions)
        return record

    def save(self, summary: CallSummary) -> None:
        """Save the summary of a call, unless a `torch.func` transform made it: its tensors have no values outside."""
        self.is_summary_lost = in_transform()
        self.summary = None if self.is_summary_lost else summary
        self.is_summary_of_graph = torch.compiler.is_compiling()
        if not self.is_summary_of_graph:
            self.running.summary = self.summary

    def last_summary(self) -> CallSummary | None:
        """The summary of this thread's last call; of any thread's where this one made none or the last was compiled."""
        if self.is_summary_lost:
            raise WatchError(
                "watch: the last call was made under a torch.func transform, and nothing of it can be read outside. "
                "Have the transformed function return the flags, with returns='both', the default."
            )
        own = None if self.is_summary_of_graph else self.running.summary
        return self.summary if own is None else own

    def __getstate__(self) -> dict[str, Any]:
        new = {"traced_record": None, "compiled_call": None, "generation_call": None, "poll": report.Poll()}
        new |= {"summary": None, "is_summary_lost": False, "is_summary_of_graph": False, "plans": Plans()}
        new |= {"gradient_hooks": {}}
        state = {**self.__dict__, **new, "device": self.location_ids.device}
        for name in ("running", "ids", "location_ids", "probes", "backward_faults"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        device = state.pop("device")  # the model may have no parameters yet
        self.__dict__.update(state)
        self.running = Running()
        self.allocate(device)
        allow_side_effects_under_checkpoint(self)


class NoLongerWatched:
    """Stands for the state of a watched model after `unwatch`: an attribute of an instance comes before it."""

    def __get__(self, model: Any, cls: type) -> Any:
        if model is None:
            return self
        raise WatchError(
            f"watch: this {cls.__name__} is no longer watched, and its reports and history are gone. Use the model "
            "that unwatch returned, or what watch(model) returns for it."
        )


@contextmanager
def unrecorded(model: Any) -> Iterator[None]:
    """Within it, a watched model returns `(out, f)`, and its calls leave no trace in what it reports."""
    watch = getattr(model, "_watch", None) if getattr(type(model), "_is_watched", False) else None
    if watch is None:
        yield
        return
    new = {"returns": "both", "history": History(), "warned": {"mixing", *watch.warned}, "running": Running()}
    before = {name: getattr(watch, name) for name in (*new, "summary", "is_summary_lost", "is_summary_of_graph")}
    watch.__dict__.update(new)
    try:
        yield
    finally:
        watch.__dict__.update(before)


def _save_probe_gradient(state: WatchState | None, probes: Tensor) -> None:
    """Save the gradient that a backward pass left on the probes, for `backward_flags`."""
    grad, probes.grad = probes.grad, None
    if state is not None and grad is not None:
        # A copy: the memory may be that of a CUDA graph.
        faults = state.backward_faults
        state.backward_faults = grad.clone() if faults is None else torch.maximum(faults, grad)
