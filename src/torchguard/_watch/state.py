"""How a model is watched, and what is known of its calls."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._operators import are_kept_whole
from torchguard._torch.dynamo import keep_static
from torchguard._torch.settings import allow_side_effects_under_checkpoint
from torchguard._torch.tracing import holds, in_transform, is_in_backward
from torchguard._watch import report
from torchguard._watch.backward import PARTS
from torchguard._watch.batch import Batch
from torchguard._watch.call import Journal, Step
from torchguard._watch.select import Checks
from torchguard.exceptions import WatchError
from torchguard.locations._tracked import LocationTable

# In batches of up to so many samples it is told when a fault is born in the backward pass.
MARKED = 4_096


class Watch:
    """How a model is watched, the journal of the call under way, and what the last call came to.

    Places are numbered: the input, the watched modules in the order of the model, the output.
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
        parts: tuple[range, ...],
    ) -> None:
        self.model, self.paths, self.checks, self.masks = model, paths, checks, masks
        self.quarantine, self.returns, self.batch_dim = quarantine, returns, batch_dim
        self.table = LocationTable(type(model).__name__, paths, ())
        messages = {check.code: check.message for check in checks.others}
        self.names = report.Names(tuple(path or type(model).__name__ for path in paths), messages)
        self.own_forward = model.__dict__.get("forward")  # set on the instance, as tools do
        self.journal: Journal | None = None
        self.parts = parts  # of the places, those of each region
        self.was_called = False  # by the watched model, not by the plain one
        self.step: Step | None = None
        self.is_step_lost = False
        self.poll = report.Poll()
        self.place(self.device)

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def journal_again(self) -> Journal | None:
        """When no call is under way, but a checkpoint runs a part of one again in backward: one that nobody reads."""
        if self.quarantine and self.was_called and is_in_backward():
            return Journal(None, self.checks, True, len(self.paths))
        return None

    def place(self, device: torch.device) -> None:
        """Make the tensors that a call needs, on a device.

        `locations` are the ids of the places, and 0: a tensor, since ids as constants would be compiled anew for every
        model. `marks` are leaves, one for each place and sample, whose gradient tells of faults born in the backward
        pass.
        """
        self.ids = tuple(self.table.locate(path).id for path in self.paths)
        self.locations = keep_static(torch.tensor([*self.ids, 0], device=device))
        self.marks: Tensor | None = None
        self.born: Tensor | None = None
        if self.quarantine:
            self.marks = keep_static(torch.zeros(len(self.paths), MARKED, device=device, requires_grad=True))
            me = weakref.ref(self)
            self.marks.register_post_accumulate_grad_hook(lambda marks: _gather(me(), marks))

    def open(self, batch: Batch) -> Journal:
        # The model may have been moved by its plain twin. A leaf cannot be made in a graph: there it does without.
        if self.locations.device != batch.device and not torch.compiler.is_compiling():
            self.place(batch.device)
        marks = self.marks if torch.is_grad_enabled() and holds(batch.size <= MARKED) else None
        if marks is not None:
            marks = marks.view_as(marks) if marks.device == batch.device else None  # for this call alone
        journal = Journal(batch, self.checks, self.quarantine, len(self.paths), marks)
        if self.parts and marks is not None and are_kept_whole():
            firsts, counts = [part.start for part in self.parts], [len(part) for part in self.parts]
            journal.parts = PARTS(marks, batch.size, firsts, counts)
        return journal

    def keep(self, step: Step) -> None:
        """What a call came to. The tensors of a `torch.func` transform have no values outside of it."""
        self.is_step_lost = in_transform()
        self.step = None if self.is_step_lost else step

    def last_step(self) -> Step | None:
        if self.is_step_lost:
            raise WatchError(
                "watch: the last call was made under a torch.func transform, and nothing of it can be read outside. "
                "Have the transformed function return the flags, with returns='both', the default."
            )
        return self.step

    def __getstate__(self) -> dict[str, Any]:
        new = {"journal": None, "step": None, "is_step_lost": False, "poll": report.Poll()}
        state = {**self.__dict__, **new, "device": self.locations.device}
        for name in ("ids", "locations", "marks", "born"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        device = state.pop("device")  # of the model itself nothing may be there yet
        self.__dict__.update(state)
        self.place(device)
        allow_side_effects_under_checkpoint(self)


def _gather(watch: Watch | None, marks: Tensor) -> None:
    """A backward pass has reached the marks: keep what was born in it."""
    grad, marks.grad = marks.grad, None
    if watch is not None and grad is not None:
        # A copy: the memory may be that of a CUDA graph.
        watch.born = grad.clone() if watch.born is None else torch.maximum(watch.born, grad)
