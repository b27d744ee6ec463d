"""The report of one guarded step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RetryReport:
    """What `Retry` found in one step, and what it did.

    Attributes:
        ok: whether the step was finite as it was given.
        bad: the bad samples, by their index in the batch, or in the micro-batches of a window one after the other.
        ids: their ids in the dataset, if the batch has them.
        because: for each bad sample, where its fault shows.
        groups: samples that are bad only together. All of them are in `bad`.
        left_out: samples that are not bad, but cannot be trained without those that are.
        skipped: whether there are no gradients of this step: model, gradients and random numbers are as before it.
        note: why nobody was accused, or why the step was skipped.
        parameters: the parameters that were not finite before the step.
        loss: over the samples that were trained.
        grad_norm: of all gradients together, before clipping.
        runs: of the closure; 1 if nothing was wrong.
        step: counts the steps of this `Retry` from 0.
        elsewhere: with several ranks, the bad samples of the others: `{rank: [sample, ...]}`.
    """

    step: int = 0
    runs: int = 1
    loss: float = float("nan")
    grad_norm: float = float("nan")
    bad: list[int] = field(default_factory=list)
    ids: list[Any] = field(default_factory=list)
    because: dict[int, str] = field(default_factory=dict)
    groups: list[list[int]] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    skipped: bool = False
    note: str = ""
    parameters: list[str] = field(default_factory=list)
    elsewhere: dict[int, list[int]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not (self.bad or self.skipped or self.note or self.elsewhere)

    def __str__(self) -> str:
        if self.ok:
            return f"step {self.step}: loss {self.loss:.4g}"
        lines = [f"step {self.step}, {self.runs} runs: {self._what()}"]
        for place, sample in enumerate(self.bad):
            name = f" (id {self.ids[place]})" if self.ids else ""
            lines.append(f"  sample {sample}{name}: {self.because.get(sample, 'not finite')}")
        lines += [f"  samples {', '.join(map(str, group))} are bad only together" for group in self.groups]
        if self.left_out:
            lines.append(f"  not bad, but not trained: {', '.join(map(str, self.left_out))}")
        lines += [f"  rank {rank}: samples {', '.join(map(str, bad))}" for rank, bad in self.elsewhere.items()]
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)

    def _what(self) -> str:
        if self.skipped:
            return "no gradients; model, gradients and random numbers are as before"
        if self.bad or self.elsewhere:
            count = len(self.bad) + sum(map(len, self.elsewhere.values()))
            return f"trained without {count} bad sample{'s' if count > 1 else ''}, loss {self.loss:.4g}"
        return f"trained on the whole batch, loss {self.loss:.4g}"


class PendingReport(RetryReport):
    """The report of a step whose outcome was not waited for. Reading it waits, and retries the step if it was bad."""

    def __init__(self, resolve: Callable[[], RetryReport]) -> None:
        self._resolve = resolve

    def __getattribute__(self, name: str) -> Any:
        if name in RetryReport.__dataclass_fields__:
            return getattr(object.__getattribute__(self, "_resolve")(), name)
        return object.__getattribute__(self, name)
