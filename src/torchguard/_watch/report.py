"""Incidents: the summary of a call in words."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._channel.codes import ErrorCode
from torchguard._channel.packing import unpack
from torchguard._channel.slot_bits import slot_code
from torchguard._watch.call_summary import CallSummary
from torchguard._watch.history_table import NO_ID
from torchguard._watch.path_bits import read_path


@dataclass(frozen=True)
class Incident:
    """A fault of a sample, or a warning about it: what it is, where it came up first, and at how many locations.

    Args:
        sample: its index in the batch.
        code: an `ErrorCode`.
        path: the module, "input", or the model's class for its output.
        position: the first bad vector there, counted over the dims between the batch and the last one. None for a
            warning: approaching overflow, quality, checks of your own.
        times: at how many locations the sample was bad; 1 for a warning.
        message: that of a check of your own.
        argument: None if the fault was found in an output. Otherwise it was found in an argument, so it was created
            before the module: the name of that argument of the model, or "" where there is none.
        id: that of the sample, if `sample_ids` were given.
        step: the number of the call, in a history.
        cause: what else is known of it, such as a parameter that is NaN.
        locations: where the sample was bad, in words and in the order in which the modules ran, the origin first.
            Empty for a warning, and where that was not recorded.
    """

    sample: int
    code: int
    path: str
    position: int | None
    times: int
    message: str = ""
    argument: str | None = None
    id: int | None = None
    step: int | None = None
    cause: str = ""
    locations: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The origin in words: "layer", "input of layer", "input pixel_values"."""
        return _in_words(self.path, self.argument)

    def __str__(self) -> str:
        step = "" if self.step is None else f"step {self.step}, "
        name = "" if self.id is None else f" (id {self.id})"
        where = self.where if self.position is None else f"{self.where}, position {self.position}"
        times = f", seen at {self.times} locations" if self.times > 1 else ""
        cause = f"; {self.cause}" if self.cause else ""
        message = f": {self.message}" if self.message else ""
        return f"{step}sample {self.sample}{name}: {ErrorCode.name(self.code)} at {where}{times}{cause}{message}"


class Labels(NamedTuple):
    """What a report needs beside the summary.

    Args:
        paths: for each number that an origin can have, the path of its location.
        arguments: and the argument, see `Incident`.
        messages: that of each code that has one.
    """

    paths: tuple[str, ...]
    arguments: tuple[str | None, ...]
    messages: dict[int, str]

    def in_words(self, numbers: tuple[int, ...]) -> tuple[str, ...]:
        """Locations in words, as `Incident.where` has them."""
        return tuple(_in_words(self.paths[i], self.arguments[i]) for i in numbers)


def _in_words(path: str, argument: str | None) -> str:
    if argument is None:
        return path
    if path != "input":
        return f"input of {path}"
    return "input" if argument in ("", "input") else f"input {argument}"


def incidents_of(summary: CallSummary, labels: Labels) -> list[Incident]:
    """The incidents of a call, sample by sample: first the fault, then the warnings. Waits for the device."""
    return _incidents(_packed(summary).cpu(), len(summary.origins), labels)


class Poll:
    """Reads summaries without waiting: starts a copy when one is asked for, and reads it once it has arrived."""

    def __init__(self) -> None:
        self._summary: CallSummary | None = None
        self._copy: Tensor | None = None
        self._rows = 0  # of origins in the copy
        self._event: Any = None
        self._newest: list[Incident] | None = None

    def read(self, summary: CallSummary | None, labels: Labels) -> list[Incident] | None:
        if self._copy is not None and (self._event is None or self._event.query()):
            self._newest, self._copy = _incidents(self._copy, self._rows, labels), None
        if summary is not None and summary is not self._summary and self._copy is None:
            self._summary, packed, self._rows = summary, _packed(summary), len(summary.origins)
            if packed.is_cuda:
                self._copy = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
                self._copy.copy_(packed, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
            else:
                self._newest, self._copy = _incidents(packed.cpu(), self._rows, labels), None
        return self._newest


def _packed(summary: CallSummary) -> Tensor:
    """All that a report needs as one tensor, so that it is copied at once."""
    code = slot_code(unpack(summary.flags)[:, 0].to(torch.int64))
    ids = torch.full_like(code, NO_ID) if summary.ids is None else summary.ids
    warnings = [] if summary.warnings is None else [summary.warnings]
    return torch.cat([code.unsqueeze(0), ids.unsqueeze(0), summary.origins, *warnings])


def _incidents(packed: Tensor, rows: int, labels: Labels) -> list[Incident]:
    """The incidents in a packed summary that has that many rows of origins."""
    incidents = []
    for sample, (code, known, *columns) in enumerate(packed.t().tolist()):
        number = None if known == NO_ID else known
        origin, further, position, *path = columns[:rows]
        if origin >= 0:
            where, argument = (labels.paths[origin], position, further + 1), labels.arguments[origin]
            locations = labels.in_words(read_path(path))
            incidents.append(Incident(sample, code, *where, argument=argument, id=number, locations=locations))
        for location, other in (divmod(warning, 16) for warning in columns[rows:] if warning >= 0):
            message = labels.messages.get(other, "")
            incidents.append(Incident(sample, other, labels.paths[location], None, 1, message, id=number))
    return incidents
