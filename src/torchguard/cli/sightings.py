"""What watched models saw in the calls of a run."""

from dataclasses import dataclass
from typing import Any

import torch

# Beyond so many, incidents are counted, and no longer kept.
_KEPT = 1_000


@dataclass(frozen=True)
class Sighting:
    """Something that happened to a sample in a call, the calls of a model counted from 1."""

    call: int
    incident: Any

    def to_dict(self) -> dict[str, Any]:
        return {"call": self.call, "text": str(self.incident), **vars(self.incident)}


class Log:
    """The calls of one watched model. Looking never raises, and on a GPU never waits."""

    def __init__(self, model: Any, twin: Any) -> None:
        self.name, self.twin = type(model).__name__, twin
        self.model = model  # as long as it is kept, its id is nobody else's
        self.calls = 0
        self.seen: list[Sighting] = []
        self.total = 0
        self.problem = ""
        self._bad_calls: torch.Tensor | None = None  # on the device, read once at the end
        self._read: Any = None

    def look(self) -> None:
        """Take down what the call that just ended came to."""
        self.calls += 1
        try:
            flags = self.twin.flags
            if flags is None:
                return
            is_bad = (flags != 0).any().to(torch.int64)
            self._bad_calls = is_bad if self._bad_calls is None else self._bad_calls.to(is_bad.device) + is_bad
            if flags.is_cpu:
                self._note(self.twin.report() if is_bad else [])
            elif (found := self.twin.poll()) is not self._read:
                self._note(found or [])
                self._read = found
        except Exception as error:  # a look may fail, the script must not
            self.problem = f"its flags could not be read: {type(error).__name__}: {error}"

    def _note(self, incidents: list[Any]) -> None:
        self.total += len(incidents)
        self.seen += [Sighting(self.calls, one) for one in incidents[: _KEPT - len(self.seen)]]

    def finish(self) -> None:
        """Read the flags of the last call where no call was looked at, or where its flags were still under way."""
        try:
            if self.calls == 0 or (self.twin.flags is not None and not self.twin.flags.is_cpu):
                newest = self.twin.report()
                if newest != self._read:
                    self._note(newest)
        except Exception as error:
            self.problem = f"its flags could not be read: {type(error).__name__}: {error}"

    @property
    def bad_calls(self) -> int:
        """How many calls had something bad in them; it may be more than incidents were read of, on a GPU."""
        counted = 0 if self._bad_calls is None else int(self._bad_calls)
        return max(counted, len({one.call for one in self.seen}))

    def to_dict(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "calls": self.calls,
            "bad_calls": self.bad_calls,
            "incidents": [one.to_dict() for one in self.seen],
            "incidents_in_all": self.total,
            "problem": self.problem,
        }
