"""A step that is not finite: which samples cause it, and the step again without them."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from torchguard._health import health_of
from torchguard._retry.closure import compiled_apart
from torchguard._retry.device_step import DeviceStep
from torchguard._retry.guarded_step import GuardedStep
from torchguard._retry.losses import Losses, RunResult
from torchguard._retry.report import SCALE_OVERFLOWS, RetryReport
from torchguard._retry.sample_search import (
    COMES_AND_GOES,
    Outcome,
    Rows,
    RunLimitError,
    Search,
    SearchResult,
    Unexplained,
)
from torchguard.exceptions import RetryError

Gradients = dict[str, Tensor]


class RecoverableStep(GuardedStep):
    """One guarded step that is run again without its bad samples, if it is not finite."""

    update: DeviceStep | None = None  # the step of the optimizers, if it is launched ahead

    def run_recovered(self, make_update: Callable[[], DeviceStep | None] = lambda: None) -> RetryReport:
        """Run the step, and run it again if it is not finite.

        Args:
            make_update: the step of the optimizers, to be launched before the outcome of the first run is known; None
                if it cannot be. Called when the device has the first run to do.
        """
        self._save()
        try:
            result = self._first_run()
            self.update = make_update() if self.retry.tensors.is_settled else None
            if self.update is None:
                loss, norm, is_finite = self._read(result, is_scaled=True)
            else:
                self.update.launch(self._status(self._numbers_of(result)), self._norm_to_clip_by())
                loss, norm, is_skipped = self.update.outcome()
                is_finite = not is_skipped
                if is_skipped:
                    loss, norm, is_finite = self._exactly(result, loss, norm)
            if is_finite:
                self._refuse_change(self.retry.tensors.learn())
                self._accumulate()
                return RetryReport(self.number, 1, loss, norm)
            return self._recovered(result)
        except BaseException:
            if not self.is_updated():
                self._undo()
            raise

    def is_updated(self) -> bool:
        """Whether the optimizers have stepped. Waits for the outcome."""
        return self.update is not None and self.update.is_done()

    # A step that is not finite.

    def _recovered(self, first: RunResult) -> RetryReport:
        if lost := self.ranks.union(self.retry.tensors.lost()):
            raise RetryError(
                f"Retry: the first step changed {', '.join(lost)} and was not finite. Trained parameters are not "
                "copied, nor tensors of this size before they were seen to change, so they cannot be restored. Change "
                "trained parameters outside of the closure; run a step on good samples first."
            )
        self._refuse_newly_changing(self.retry.tensors.newly_changing())
        self.retry.tensors.restore()  # a critic that the closure trains was finite before this run, and may not be now
        note, parameters = self._cause_beside_samples(first)
        if note:
            self._undo()
            return self._skipped(note, parameters=parameters)
        inputs, shown = self._suspects(first)
        if len(inputs) == len(shown) == self.closure.size and not self.closure.is_scalar:
            self._undo()
            return self._skipped("all samples are bad", bad=inputs, inputs=inputs, shown=shown)
        scaled = None if self.scaler is None or shown else self._gradients_by_name()
        constants, unsaved = self.retry.tensors.constants(), self.scope.unsaved()
        both = [row for row in shown if row in set(inputs)]
        rows = tuple(range(self.closure.size))
        stages = [stage for stage in (both, shown, inputs) if 0 < len(stage) < self.closure.size]
        self.candidates = {tuple(row for row in rows if row not in set(stage)) for stage in stages}
        search = Search(
            self._try,
            rows,
            stages=stages,
            shown=shown if len(shown) < self.closure.size else (),
            is_steady=self.retry.is_steady is True,
            is_moved=lambda: self._shown(self.results[rows]) != shown,
            certain=lambda: () if self.is_random and len(shown) == self.closure.size else both,
            is_random=lambda: self.is_random,
            is_coupled=lambda good: not {*range(self.closure.size)} - {*good} <= {*shown} or self._is_coupled(good),
            min_batch=self.retry.min_batch,
        )
        with self._calling_again():
            finding = search.find()
            if finding.reason in (*COMES_AND_GOES, Unexplained.MOVED) and scaled is None:
                self.retry.is_steady = False
            elif self.retry.is_steady is None and search.is_steady:
                self.retry.is_steady = True
            self._refuse_newly_changing(self.retry.tensors.changed_constants(constants))
            if changed := self.ranks.union(unsaved.changed()):
                raise RetryError(
                    f"Retry: the closure changes {', '.join(changed)}, which is not saved before a step: a large "
                    "container or array, an iterator or queue, a sparse tensor, an attribute of a tensor, or an object "
                    "of torch or the standard library. Change it outside of the closure."
                )
            return self._concluded(search, finding, inputs, shown, scaled)

    def _refuse_newly_changing(self, names: list[str]) -> None:
        """Refuse a change of tensors that are not saved, because no step has changed them before."""
        if changed := self.ranks.union(names):
            raise RetryError(
                f"Retry: the closure changes {', '.join(changed)}, which it did not before, so that the value before "
                "this step is lost: load it from a checkpoint. From now on it is saved."
            )

    def _cause_beside_samples(self, first: RunResult) -> tuple[str, list[str]]:
        """Why the step is not finite whatever its samples are, if that is so; and the parameters that are to blame."""
        if bad := self._bad_parameters():
            named = ", ".join(bad)
            return f"not finite before the step: {named}. No sample is to blame: load an earlier checkpoint", bad
        names = {id(one): name for name, one in self.parameters.items()}
        gradients = {names[key]: one for key, one in self.accumulated_gradients().items()}
        if bad := self.ranks.union(_named(health_of(gradients).bad)):
            named = ", ".join(bad)
            return f"the gradients of before the step are not finite: {named}. No sample is to blame: clear them", []
        if not self.closure.size:
            return "the batch of every rank is empty", []
        if first.weight is not None and not bool(first.weight):
            return "the weights of the losses add up to 0, so that there is nothing to train on", []
        return "", []

    def _bad_parameters(self) -> list[str]:
        """Trained parameters that are not finite, and frozen ones with NaN: some masks are frozen parameters of Inf."""
        bad = health_of(self.parameters).bad
        return self.ranks.union(
            _named({name: kind for name, kind in bad.items() if kind == "NaN" or self.parameters[name].requires_grad})
        )

    def _suspects(self, first: RunResult) -> tuple[list[int], list[int]]:
        """The samples of all ranks whose inputs, and those whose losses, are not finite."""
        inputs, start = [], 0
        for batch in self.closure.batches:
            inputs += [start + row for row in batch.non_finite_inputs()]
            start += batch.size
        return self._of_all(inputs), self._shown(first.losses)

    def _shown(self, of_batches: Sequence[Losses | None]) -> list[int]:
        """The samples of all ranks whose losses or weights are not finite."""
        shown, start = [], 0
        for batch, losses in zip(self.closure.batches, of_batches, strict=True):
            if losses is not None and losses.is_scalar:
                shown += [] if bool(losses.sums.isfinite()) else range(start, start + batch.size)
            elif losses is not None:
                shown += [start + row for row in losses.non_finite()]
            start += batch.size
        return self._of_all(shown)

    def _of_all(self, rows: list[int]) -> list[int]:
        """Some samples of each rank as samples of all ranks."""
        gathered = self.ranks.gather(rows)
        starts = [sum(map(sum, self.closure.sizes[:rank])) for rank in range(len(gathered))]
        return [start + row for start, of_rank in zip(starts, gathered, strict=True) for row in of_rank]

    @contextlib.contextmanager
    def _calling_again(self) -> Iterator[None]:
        """Have the closure called so that nothing that is compiled for the healthy step changes."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.scope.wrappers.retrying())
            if self.retry.retries == "compiled" and not self.retry.keep_shapes:
                self.closure.call_again = compiled_apart(self.closure.function)
            elif not self.retry.keep_shapes:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield

    def _try(self, rows: Rows, stream: int = 0, is_final: bool = False, is_scaled: bool = False) -> Outcome:
        """Run the step on some samples.

        A rank or micro-batch that has few of them runs copies beside them, unless the run is final: if it has too few
        for `min_batch`, if the closure raised without copies, and with FSDP2, where an exception is the end.
        """
        if self._mixes_ranks(rows):
            return Outcome.UNKNOWN
        too_small = self._too_small(rows)
        if is_final and too_small:
            self.closure.raised_in = too_small
            return Outcome.UNKNOWN
        is_filled = not is_final and bool(too_small or (self.scope.wrappers.is_sharded and rows not in self.candidates))
        result = self._run_again(rows, stream, is_final, is_scaled, is_filled)
        if result is None and not is_final and not is_filled and self.closure.sizes != [[self.closure.size]]:
            result = self._run_again(rows, stream, is_final, is_scaled, is_filled=True)
        if result is None:
            return Outcome.UNKNOWN
        self._correct(result)
        if stream == 0:
            self.results[rows] = result.losses
        self.loss, self.norm, is_finite = self._read(result, is_scaled)
        return Outcome.FINITE if is_finite else Outcome.NON_FINITE

    def _run_again(self, rows: Rows, stream: int, is_final: bool, is_scaled: bool, is_filled: bool) -> RunResult | None:
        if self.runs >= self.retry.max_runs - (not is_final):  # the last one is for the good samples
            raise RunLimitError
        self._restore(stream)
        self.scope.wrappers.copy_buffers()
        self.runs += 1
        is_reduced = is_final or rows in self.candidates or not self.scope.wrappers.replicated
        self.last = rows, stream, is_final or (is_reduced and not is_filled and 2 * len(rows) > self.closure.size)
        before = self.scope.random_state() if self.runs == 2 else None
        scale = self._scale if is_scaled else lambda loss: loss
        result = self.closure.run_again(rows, is_final, is_reduced, is_filled, scale)
        if before is not None:
            self.is_random = self.ranks.any(not before.is_unchanged())
        return result

    def _mixes_ranks(self, rows: Rows) -> bool:
        """Whether a rank would run the samples of another, and these would enter the statistics of all."""
        if not any(isinstance(one, nn.SyncBatchNorm) and one.training for _, one in self.scope.reached.modules):
            return False
        return any(any(of_ranks) and not all(of_ranks) for of_ranks in zip(*self.closure.split(rows), strict=True))

    def _too_small(self, rows: Rows) -> set[tuple[int, int]]:
        """The ranks and micro-batches that have some of these samples, but fewer than `min_batch`."""
        return {
            (rank, number)
            for rank, parts in enumerate(self.closure.split(rows))
            for number, part in enumerate(parts)
            if part and len(part) < min(self.closure.sizes[rank][number], self.retry.min_batch)
        }

    def _is_coupled(self, good: Rows) -> bool:
        """Whether the losses of the good samples differ with and without the bad ones."""
        whole, part = self.results.get(tuple(range(self.closure.size))), self.results.get(good)
        differ = whole is None or part is None
        if whole is not None and part is not None:
            for all_rows, of_all, of_part in zip(self.closure.split(good)[self.ranks.rank], whole, part, strict=True):
                if of_all is not None and of_part is not None:
                    differ |= of_all.is_scalar or not _close(of_all.sums[all_rows], of_part.sums, self._tolerance())
        return self.ranks.any(differ)

    def _tolerance(self) -> float:
        """How far the losses of a sample may differ between batches by rounding alone."""
        return 1e-2 if any(one.dtype in (torch.float16, torch.bfloat16) for one in self.parameters.values()) else 1e-4

    def _concluded(
        self, search: Search, finding: SearchResult, inputs: list[int], shown: list[int], scaled: Gradients | None
    ) -> RetryReport:
        count = self.closure.size
        if finding.reason in COMES_AND_GOES:
            if scaled is not None:  # finite at scale 1: the scaler has to see that its scale is too large
                return self._left_to_the_scaler(scaled)
            note = finding.reason.value
        elif finding.reason is not None:
            is_all = finding.reason is Unexplained.ALL and len(shown) == count and not self.closure.is_scalar
            is_all = is_all and self.retry.is_steady is not False and search.stays_non_finite()
            self._undo()
            others = self.retry.tensors.non_finite()
            note = ". NaN before the step: ".join([finding.reason.value, *([", ".join(others)] if others else [])])
            note += self._raised()
            return self._skipped(note, bad=[*range(count)] if is_all and not others else [], inputs=inputs, shown=shown)
        else:
            note = ""
        too_many = self._too_many(len(finding.bad), count)
        if too_many:
            self._undo()
            return self._skipped(too_many, bad=[*finding.bad], inputs=inputs, shown=shown)
        return self._final(finding, note, inputs, shown)

    def _final(self, finding: SearchResult, note: str, inputs: list[int], shown: list[int]) -> RetryReport:
        """Gradients of the good samples."""
        good = finding.good
        if self.last != (good, 0, True) or self.scaler is not None:
            outcome = self._try(good, is_final=True, is_scaled=True)
            while outcome is Outcome.UNKNOWN and (rest := self.closure.without(good, self.closure.raised_in)) not in (
                (),
                good,
            ):
                good = rest
                outcome = self._try(good, is_final=True, is_scaled=True)
            if outcome is Outcome.UNKNOWN or (outcome is Outcome.NON_FINITE and self.scaler is None):
                self._undo()
                note = "the step without the bad samples is not finite, or raised an exception" + self._raised()
                return self._skipped(note, bad=[*finding.bad])
            if outcome is Outcome.NON_FINITE:
                note = SCALE_OVERFLOWS
        self._accumulate()
        report = self._report([*finding.bad], inputs, shown)
        report.loss, report.grad_norm, report.note = self.loss, self.norm, note or self._note_of_tensors(good)
        report.groups = [rows for group in finding.groups if (rows := self._own(group))]
        report.left_out = self._own([*finding.left_out, *sorted({*finding.good} - {*good})])
        for group in finding.groups:
            own = self._own(group)
            others = ["samples of other ranks"] if len(own) < len(group) else []
            for row in own:
                partners = [str([one for one in own if one != row])] if len(own) > 1 else []
                report.because[row] = f"bad only together with {' and '.join([*partners, *others])}"
        return report

    def _note_of_tensors(self, good: Rows) -> str:
        """Say which tensors the good samples were trained with whole, if their losses do not show that it is right."""
        names = {name: None for batch in self.closure.batches for name, _ in batch.passed_whole()}
        if not self.ranks.any(len(good) < self.closure.size and bool(names)) or not self._is_coupled(good):
            return ""
        return (
            f"{', '.join(names)} of the batch was passed whole to the step without the bad samples. If its rows belong "
            "to samples, give select=; if not, name it in shared="
        )

    def _raised(self) -> str:
        """What the first part that could not be run raised, for a note."""
        raised = self.closure.first_exception
        return f". A run on some samples raised {raised}" if raised else ""

    def _left_to_the_scaler(self, scaled: Gradients) -> RetryReport:
        for name, parameter in self.parameters.items():
            parameter.grad = scaled.get(name)
        self._accumulate()
        return RetryReport(self.number, self.runs, self.loss, self.norm, note=SCALE_OVERFLOWS)

    def _too_many(self, bad: int, count: int) -> str:
        most = self.retry.max_bad
        if most is None:
            return ""
        limit = most * count if isinstance(most, float) else most
        return f"{bad} of {count} samples are bad, more than max_bad={most} allows" if bad > limit else ""

    def _skipped(
        self,
        note: str,
        bad: Sequence[int] = (),
        inputs: Sequence[int] = (),
        shown: Sequence[int] = (),
        parameters: Sequence[str] = (),
    ) -> RetryReport:
        report = self._report(bad, inputs, shown)
        report.skipped, report.note, report.parameters = True, note, [*parameters]
        return report

    def _report(self, bad: Sequence[int], inputs: Sequence[int], shown: Sequence[int]) -> RetryReport:
        """A report of samples of all ranks, by their index in this rank's batch."""
        of_ranks = [self._of_rank(bad, rank) for rank in range(self.ranks.size)]
        own = of_ranks[self.ranks.rank]
        report = RetryReport(self.number, self.runs, bad=own)
        if len(inputs) < len(shown) == self.closure.size > len(bad):
            shown = ()  # every loss is bad: that of a sample says nothing about it
        in_input, in_loss = ({*self._own(rows)} for rows in (inputs, shown))
        report.because = {row: _because(row in in_input, row in in_loss) for row in own}
        if self.ranks.size > 1:
            report.rank, report.global_bad = self.ranks.rank, [*bad]
        report.elsewhere = {rank: rows for rank, rows in enumerate(of_ranks) if rows and rank != self.ranks.rank}
        names = [batch.ids(self.retry.ids) for batch in self.closure.batches]
        if own and all(one is not None for one in names):
            joined = [name for one in names if one is not None for name in one]
            report.ids = [joined[row] for row in own]
        return report

    def _of_rank(self, rows: Iterable[int], rank: int) -> list[int]:
        start = sum(map(sum, self.closure.sizes[:rank]))
        return [row - start for row in rows if start <= row < start + sum(self.closure.sizes[rank])]

    def _own(self, rows: Iterable[int]) -> list[int]:
        return self._of_rank(rows, self.ranks.rank)

    def _gradients_by_name(self) -> Gradients:
        kept = self.scope.wrappers.keep([one.grad for one in self.parameters.values()])
        return {name: one for name, one in zip(self.parameters, kept, strict=True) if one is not None}


def _named(bad: Mapping[str, str]) -> list[str]:
    return [f"{name.removeprefix('model.')} ({kind})" for name, kind in bad.items()]


def _because(in_input: bool, in_loss: bool) -> str:
    if in_input:
        return "NaN or Inf in the input" + (" and in the loss" if in_loss else "")
    return "NaN or Inf in the loss" if in_loss else "the batch is finite without it, and not with it"


def _close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if one.shape != other.shape or not bool(one.isfinite().all()):
        return False
    return bool(((one - other).abs() <= tolerance * (one.abs() + other.abs()) + 1e-30).all())
