"""What went wrong in a call, in words."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard._channel.codes import ErrorCode
from torchguard._channel.layout import slot_code
from torchguard._channel.slots import unpack
from torchguard._watch.call import Step


@dataclass(frozen=True)
class Incident:
    """Something about a sample: what, where first, at which position there, and in how many places it was seen bad.

    `position` is None, and `times` is 1, for what is no fault: overflow to come, quality, checks of your own.
    """

    sample: int
    code: int
    path: str
    position: int | None
    times: int
    message: str = ""

    def __str__(self) -> str:
        where = self.path if self.position is None else f"{self.path}, position {self.position}"
        passed = f", seen in {self.times} places" if self.times > 1 else ""
        message = f": {self.message}" if self.message else ""
        return f"sample {self.sample}: {ErrorCode.name(self.code)} at {where}{passed}{message}"


class Names(NamedTuple):
    """What to call the places of a model, and what its checks have to say."""

    paths: tuple[str, ...]
    messages: dict[int, str]


def incidents_of(step: Step, names: Names) -> list[Incident]:
    """The incidents of a step, sample by sample: first the fault, if it went bad, then the rest."""
    return _read(_gathered(step).cpu(), names)


class Poll:
    """Reads steps without waiting: a copy is started when it is asked for, and read when it has arrived."""

    def __init__(self) -> None:
        self._step: Step | None = None
        self._copy: Tensor | None = None
        self._event: Any = None
        self._newest: list[Incident] | None = None

    def read(self, step: Step | None, names: Names) -> list[Incident] | None:
        if self._copy is not None and (self._event is None or self._event.query()):
            self._newest, self._copy = _read(self._copy, names), None
        if step is not None and step is not self._step and self._copy is None:
            self._step, gathered = step, _gathered(step)
            if gathered.is_cuda:
                self._copy = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
                self._copy.copy_(gathered, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
            else:
                self._newest, self._copy = _read(gathered.cpu(), names), None
        return self._newest


def _gathered(step: Step) -> Tensor:
    code = slot_code(unpack(step.flags)[:, 0].to(torch.int64))
    return torch.cat([code.unsqueeze(0), step.told, *([] if step.remarks is None else [step.remarks])])


def _read(gathered: Tensor, names: Names) -> list[Incident]:
    found = []
    for sample, (code, origin, more, position, *remarks) in enumerate(gathered.t().tolist()):
        if origin >= 0:
            found.append(Incident(sample, code, names.paths[origin], position, more + 1))
        for place, other in (divmod(remark, 16) for remark in remarks if remark >= 0):
            found.append(Incident(sample, other, names.paths[place], None, 1, names.messages.get(other, "")))
    return found
