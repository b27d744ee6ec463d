"""The report of one guarded step, and of many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torchguard.report import Answer, LineChart, Section, Series, Shown, Status, Table

# Called with the report of each step when it is concluded: `torchguard run` observes them.
OBSERVERS: list[Callable[["RetryReport"], None]] = []
# The note of a step that a `GradScaler` skips.
SCALE_OVERFLOWS = "the loss scale overflows: finite at a scale of 1, so the GradScaler skips the step"


@dataclass
class RetryReport(Shown):
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
        rank: with several ranks, that of this report.
        global_bad: with several ranks, all bad samples by their index in the batch of all ranks, rank 0's first.
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
    rank: int | None = None
    global_bad: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.bad or self.skipped or self.note or self.elsewhere)

    def section(self) -> Section:
        """What was found and done, as a section of a report."""
        return retry_section([self])

    def __str__(self) -> str:
        if self.ok:
            return f"step {self.step}: loss {self.loss:.4g}"
        on_rank = "" if self.rank is None else f"rank {self.rank}, "
        lines = [f"step {self.step}, {on_rank}{self.runs} runs: {self.outcome}"]
        for index, sample in enumerate(self.bad):
            name = f" (id {self.ids[index]})" if self.ids else ""
            lines.append(f"  sample {sample}{name}: {self.because.get(sample, 'not finite')}")
        lines += [f"  samples {', '.join(map(str, group))} are bad only together" for group in self.groups]
        if self.left_out:
            lines.append(f"  not bad, but not trained: {', '.join(map(str, self.left_out))}")
        lines += [f"  rank {rank}: samples {', '.join(map(str, bad))}" for rank, bad in self.elsewhere.items()]
        if self.global_bad:
            lines.append(f"  in the batch of all ranks: samples {', '.join(map(str, self.global_bad))}")
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)

    @property
    def outcome(self) -> str:
        """What was done, in one line."""
        if self.skipped:
            return "no gradients; model, gradients and random numbers are as before"
        if self.bad or self.elsewhere:
            count = len(self.bad) + sum(map(len, self.elsewhere.values()))
            samples = f"without {count} bad sample{'s' if count > 1 else ''}"
        else:
            samples = "on the whole batch"
        return f"{'run' if self.note == SCALE_OVERFLOWS else 'trained'} {samples}, loss {self.loss:.4g}"


class PendingReport(RetryReport):
    """The report of a step whose outcome was not waited for. Reading it waits, and retries the step if it was bad."""

    def __init__(self, resolve: Callable[[], RetryReport]) -> None:
        self._resolve = resolve

    def __getattribute__(self, name: str) -> Any:
        if name in RetryReport.__dataclass_fields__:
            return getattr(object.__getattribute__(self, "_resolve")(), name)
        return object.__getattribute__(self, name)


def retry_section(reports: Sequence[RetryReport]) -> Section:
    """The steps of a run: how many were bad, what was done about them, and loss and gradient norm over steps."""
    bad = [one for one in reports if not one.ok]
    answer = Answer(*_answer(reports, bad))
    if not reports:
        return Section("Retry", (answer,))
    columns = ("step", "runs", "bad samples", "dataset ids", "what was done", "where the faults show", "note")
    rows = tuple(
        (
            one.step,
            one.runs,
            ", ".join(map(str, one.bad)),
            ", ".join(map(str, one.ids)),
            one.outcome,
            "\n".join(f"{sample}: {why}" for sample, why in one.because.items()),
            one.note,
        )
        for one in bad
    )
    tables = (Table(columns, rows, "Steps that were not finite as they were given"),) if bad else ()
    return Section("Retry", (answer, *tables, *_curves(reports)))


def _answer(reports: Sequence[RetryReport], bad: Sequence[RetryReport]) -> tuple[Status, str]:
    steps = f"{len(reports):,} step{'' if len(reports) == 1 else 's'}"
    if not reports:
        return "ok", "No step was taken."
    if not bad:
        return "ok", f"{steps}, all of them finite as they were given."
    skipped = sum(one.skipped for one in bad)
    without = sum(bool(one.bad or one.elsewhere) and not one.skipped for one in bad)
    counts = {
        "trained without their bad samples": without,
        "trained on the whole batch": len(bad) - skipped - without,
        "not trained": skipped,
    }
    parts = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    status: Status = "warning" if without == len(bad) else "bad"
    return status, f"{len(bad):,} of {steps} {'was' if len(bad) == 1 else 'were'} not finite: {parts}."


def _curves(reports: Sequence[RetryReport]) -> tuple[LineChart, ...]:
    if len(reports) < 2:
        return ()
    steps = tuple(one.step for one in reports)
    loss = LineChart("Loss over the samples that were trained", "step", "loss", steps, (_series("loss", reports),))
    norm = LineChart("Norm of all gradients", "step", "norm", steps, (_series("grad_norm", reports),))
    return loss, norm


def _series(name: str, reports: Sequence[RetryReport]) -> Series:
    return Series(name, tuple(getattr(one, name) for one in reports))
