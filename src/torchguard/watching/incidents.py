"""What went wrong in a call, in words."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchguard.errors.codes import ErrorCode
from torchguard.errors.layout import slot_code
from torchguard.errors.slots import unpack
from torchguard.watching.journal import Step


@dataclass(frozen=True)
class Incident:
    """A sample that went bad: what, where first, at which position there, and in how many places it was seen bad."""

    sample: int
    code: int
    path: str
    position: int
    times: int

    def __str__(self) -> str:
        where = f"{self.path}, position {self.position}"
        passed = f", seen in {self.times} places" if self.times > 1 else ""
        return f"sample {self.sample}: {ErrorCode.name(self.code)} at {where}{passed}"


def incidents_of(step: Step, paths: tuple[str, ...], model: str) -> list[Incident]:
    """The incidents of a step, one for each sample that went bad."""
    return _read(_gathered(step).cpu(), paths, model)


class Poll:
    """Reads steps without waiting: a copy is started when it is asked for, and read when it has arrived."""

    def __init__(self) -> None:
        self._step: Step | None = None
        self._copy: Tensor | None = None
        self._event: Any = None
        self._newest: list[Incident] | None = None

    def read(self, step: Step | None, paths: tuple[str, ...], model: str) -> list[Incident] | None:
        if self._copy is not None and (self._event is None or self._event.query()):
            self._newest, self._copy = _read(self._copy, paths, model), None
        if step is not None and step is not self._step and self._copy is None:
            self._step, gathered = step, _gathered(step)
            if gathered.is_cuda:
                self._copy = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
                self._copy.copy_(gathered, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
            else:
                self._newest, self._copy = _read(gathered.cpu(), paths, model), None
        return self._newest


def _gathered(step: Step) -> Tensor:
    code = slot_code(unpack(step.flags)[:, 0].to(torch.int64))
    return torch.stack([code, step.origin, step.times.to(torch.int64), step.position])


def _read(gathered: Tensor, paths: tuple[str, ...], model: str) -> list[Incident]:
    return [
        Incident(sample, code, paths[origin] or model, position, times)
        for sample, (code, origin, times, position) in enumerate(gathered.t().tolist())
        if origin >= 0
    ]
