"""Incidents: the summary of a call in words."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._channel.codes import ErrorCode
from torchguard._channel.layout import slot_code
from torchguard._channel.slots import unpack
from torchguard._watch.summarize import CallSummary


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
    """

    sample: int
    code: int
    path: str
    position: int | None
    times: int
    message: str = ""

    def __str__(self) -> str:
        where = self.path if self.position is None else f"{self.path}, position {self.position}"
        times = f", seen at {self.times} locations" if self.times > 1 else ""
        message = f": {self.message}" if self.message else ""
        return f"sample {self.sample}: {ErrorCode.name(self.code)} at {where}{times}{message}"


class Labels(NamedTuple):
    """What a report needs beside the summary: the name of each location, and the message of each code that has one."""

    paths: tuple[str, ...]
    messages: dict[int, str]


def incidents_of(summary: CallSummary, labels: Labels) -> list[Incident]:
    """The incidents of a call, sample by sample: first the fault, then the warnings. Waits for the device."""
    return _incidents(_packed(summary).cpu(), labels)


class Poll:
    """Reads summaries without waiting: starts a copy when one is asked for, and reads it once it has arrived."""

    def __init__(self) -> None:
        self._summary: CallSummary | None = None
        self._copy: Tensor | None = None
        self._event: Any = None
        self._newest: list[Incident] | None = None

    def read(self, summary: CallSummary | None, labels: Labels) -> list[Incident] | None:
        if self._copy is not None and (self._event is None or self._event.query()):
            self._newest, self._copy = _incidents(self._copy, labels), None
        if summary is not None and summary is not self._summary and self._copy is None:
            self._summary, packed = summary, _packed(summary)
            if packed.is_cuda:
                self._copy = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
                self._copy.copy_(packed, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
            else:
                self._newest, self._copy = _incidents(packed.cpu(), labels), None
        return self._newest


def _packed(summary: CallSummary) -> Tensor:
    """All that a report needs as one tensor, so that it is copied at once."""
    code = slot_code(unpack(summary.flags)[:, 0].to(torch.int64))
    warnings = [] if summary.warnings is None else [summary.warnings]
    return torch.cat([code.unsqueeze(0), summary.origins, *warnings])


def _incidents(packed: Tensor, labels: Labels) -> list[Incident]:
    incidents = []
    for sample, (code, origin, further, position, *warnings) in enumerate(packed.t().tolist()):
        if origin >= 0:
            incidents.append(Incident(sample, code, labels.paths[origin], position, further + 1))
        for location, other in (divmod(warning, 16) for warning in warnings if warning >= 0):
            message = labels.messages.get(other, "")
            incidents.append(Incident(sample, other, labels.paths[location], None, 1, message))
    return incidents
