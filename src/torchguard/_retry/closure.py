"""A closure called on samples of its batch: forward, loss, backward.

A step is run once as it was given. It is run again only if that was not finite: on parts of its batch, until the bad
samples are found, and at last on the good ones.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchguard._pytrees import map_tensors
from torchguard._retry.batch import Batch, tensors_of
from torchguard._retry.losses import Losses, RunResult, losses_of
from torchguard._retry.ranks import Alone
from torchguard._retry.sample_search import Rows
from torchguard._retry.wrappers import NOTHING, Wrappers
from torchguard._torch.training import tracing_errors
from torchguard.exceptions import RetryError

Closure = Callable[[Any], Any]
Scale = Callable[[Tensor], Tensor]

_running_again: list[None] = []  # one item for each: several threads may train, and `+= 1` is no single operation


def is_retrying() -> bool:
    """Whether a closure is being run again by `Retry`: hooks that count calls or log can ask this.

    >>> is_retrying()
    False
    """
    return bool(_running_again)


@contextlib.contextmanager
def running_again() -> Iterator[None]:
    _running_again.append(None)
    try:
        yield
    finally:
        _running_again.pop()


class BatchedClosure:
    """A closure and its batch, which can be run on any part of the samples.

    Args:
        closure: returns the losses of a batch.
        batches: one batch, or the micro-batches of a window.
        ranks: those that share the gradients.
        wrappers: DDP and FSDP2 around the models.
        aside: a context that puts back what is changed in it, but gradients.
        keep_shapes: fill up parts with copies of their samples, whose losses do not count.
    """

    def __init__(
        self,
        closure: Closure,
        batches: Sequence[Batch],
        ranks: Alone,
        wrappers: Wrappers,
        aside: Callable[[], contextlib.AbstractContextManager[None]],
        keep_shapes: bool = False,
    ) -> None:
        self.function, self.batches, self.ranks, self.keep_shapes = closure, batches, ranks, keep_shapes
        self.wrappers, self.aside = wrappers, aside
        self.call_again = closure  # how the closure is called when the step is run again
        self.is_scalar = False
        self.raised_in: set[tuple[int, int]] = set()  # the ranks and micro-batches whose closure raised an exception
        self.first_exception = ""  # of those that made a part unknown on this rank, as text
        self._sizes: list[list[int]] | None = None  # of the micro-batches of each rank
        self._weight: Tensor | None = None  # of all samples of this rank

    @property
    def sizes(self) -> list[list[int]]:
        """The sizes of the micro-batches of each rank. The first reader asks the other ranks."""
        if self._sizes is None:
            self._sizes = self.ranks.gather([batch.size for batch in self.batches])
            if len({len(sizes) for sizes in self._sizes}) > 1:
                raise RetryError(f"Retry: ranks have different numbers of micro-batches: {self._sizes}.")
        return self._sizes

    @property
    def size(self) -> int:
        """The samples of all ranks."""
        return sum(map(sum, self.sizes))

    @property
    def local_size(self) -> int:
        return sum(batch.size for batch in self.batches)

    def split(self, rows: Sequence[int]) -> list[list[list[int]]]:
        """For each rank and micro-batch, which of its samples are among these of all ranks."""
        found, start = [], 0
        for sizes in self.sizes:
            of_rank = []
            for size in sizes:
                of_rank.append([row - start for row in rows if start <= row < start + size])
                start += size
            found.append(of_rank)
        return found

    def without(self, rows: Rows, parts: Collection[tuple[int, int]]) -> Rows:
        """Those of some samples that are not in these parts, each a rank and a micro-batch."""
        parts_of = [
            (rank, number)
            for rank, sizes in enumerate(self.sizes)
            for number, size in enumerate(sizes)
            for _ in range(size)
        ]
        return tuple(row for row in rows if parts_of[row] not in parts)

    def first_run(self, scale: Scale) -> RunResult:
        """The step as it was given."""
        samples = self.ranks.total_number(self.local_size)
        result = self._run([[None] for _ in self.batches], samples, None, scale, is_reduced=True)
        assert result is not None
        weights = [one.weights for one in result.losses if one is not None and one.weights is not None]
        self._weight = torch.stack([one.nan_to_num(0, 0, 0).sum() for one in weights]).sum() if weights else None
        self.is_scalar = any(one is not None and one.is_scalar for one in result.losses)
        return result

    def run_again(
        self, rows: Rows, is_final: bool, is_reduced: bool, is_filled: bool, scale: Scale
    ) -> RunResult | None:
        """The step on a part of its samples; None if the closure raised an exception on any rank.

        The losses of a small part are divided by the number of all samples, as in the whole batch: its own mean has
        larger gradients, which may overflow where those of the batch did not.

        Args:
            rows: the samples.
            is_final: whether the gradients are those of the step.
            is_reduced: whether DDP adds up the gradients of the ranks.
            is_filled: whether each rank runs copies of its samples beside them, as many as its batch has samples.
            scale: multiplies a loss by the scale of a GradScaler.
        """
        is_filled = is_filled or self.keep_shapes
        has_own_mean = is_final or 2 * len(rows) > self.size
        of_ranks = self.split(rows)
        parts = [[of_rank[number] for of_rank in of_ranks] for number in range(len(self.batches))]
        with running_again():
            if has_own_mean:
                return self._run(parts, len(rows), None, scale, is_reduced, is_filled)
            weight = None if self._weight is None else self.ranks.total(self._weight)
            return self._run(parts, self.size, weight, scale, is_reduced, is_filled)

    def _run(
        self,
        parts: list[list[Any]],
        samples: int | Tensor,
        weight: Tensor | None,
        scale: Scale,
        is_reduced: bool,
        is_filled: bool = False,
    ) -> RunResult | None:
        """Forward and backward over the micro-batches.

        Args:
            parts: for each micro-batch, the samples of each rank; `[None]` for the batch as it was given.
            samples: what losses per sample are divided by.
            weight: what weighted losses are divided by; None for the weights of this run.
            scale: multiplies a loss by the scale of a GradScaler.
            is_reduced: whether DDP adds up the gradients of the ranks: once, with the last micro-batch.
            is_filled: whether copies of samples keep the sizes of the batches.
        """
        numbers = [number for number, of_ranks in enumerate(parts) if of_ranks == [None] or any(of_ranks)]
        losses: list[Losses | None] = [None] * len(parts)
        divisor, weights, total = weight, None, None
        for number in numbers:
            of_ranks = parts[number]
            is_own = of_ranks == [None] or bool(of_ranks[self.ranks.rank])
            with (
                self.wrappers.reducing(is_reduced and number == numbers[-1]),
                NOTHING if is_own else self.aside(),
            ):
                found, size = self._forward(number, of_ranks, is_filled)
                if found is None:
                    return None
                if found.weights is not None:
                    own = found.weights.sum().to(_dtype_of(found.sums, found.weights))
                    own = self.ranks.total(own if is_own else torch.zeros_like(own))
                    weights = own if weights is None else weights + own
                    # The weights of later micro-batches are not known yet: gradients are corrected for at the end.
                    if divisor is None:
                        scaled = own * len(numbers)
                        divisor = scaled if len(numbers) == 1 else torch.where(own == 0, 1, scaled)
                    loss = found.sums.sum() / divisor
                elif found.is_scalar and not size:  # a mean over no samples is NaN, its gradient zero
                    loss = found.sums.nan_to_num(0, 0, 0) * (size / samples)
                elif found.is_scalar:
                    loss = found.sums if isinstance(samples, int) and size == samples else found.sums * (size / samples)
                elif isinstance(samples, int) and found.sums.numel() == samples:
                    loss = found.sums.mean()
                else:
                    loss = found.sums.sum() / samples
                if is_own:
                    losses[number] = Losses(found.sums.detach(), found.weights)
                else:
                    loss = loss * 0
                is_last = is_reduced and number == numbers[-1]
                communicates = self.wrappers.is_sharded or (is_last and bool(self.wrappers.replicated))
                has_raised = False
                try:
                    scale(loss * self.ranks.size if self.ranks.size > 1 else loss).backward()
                except Exception as exception:
                    if of_ranks == [None] or (self.ranks.size > 1 and communicates):  # other ranks wait in this pass
                        raise
                    has_raised = True
                    self._note_exception(exception)
                if of_ranks != [None] and not communicates and self.ranks.any(has_raised):
                    flags = self.ranks.gather(has_raised)
                    self.raised_in = {(rank, number) for rank, flag in enumerate(flags) if flag}
                    return None
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        if len(numbers) == 1 or weights is None or divisor is None or weight is not None:
            return RunResult(total, losses, weight=weights)
        return RunResult(total * (divisor / weights), losses, divisor / weights, weights)

    def _forward(self, number: int, of_ranks: list[Any], is_filled: bool) -> tuple[Losses | None, int]:
        """The losses of some samples of a micro-batch, and how many these are; None if a rank raised an exception."""
        batch = self.batches[number]
        if of_ranks == [None]:
            found = losses_of(self.function(batch.whole()), batch.size)
            batch.is_one_loss = found.is_scalar
            if batch.size and not found.sums.requires_grad:
                raise RetryError(
                    "Retry: the loss that the closure returned requires no gradient. It was detached or computed under "
                    "torch.no_grad(), or no parameter that it depends on requires one."
                )
            if found.is_scalar and not batch.is_clear():
                raise RetryError(
                    "Retry: the closure returned one loss, and the sizes of the batch's tensors do not tell which are "
                    f"samples ({batch.size}?). Return a loss for each sample, name what belongs to no sample in "
                    "shared=, or give size=, which counts them: of a list with one item per sample, its length."
                )
            return found, batch.size
        own, given = of_ranks[self.ranks.rank], of_ranks
        if is_filled:
            given = [_filled(part, sizes[number]) for part, sizes in zip(of_ranks, self.sizes, strict=True)]
        stand_in = None if all(given) else self._stand_in(batch, given)
        found, raised = None, None
        try:
            found = self.wrappers.call(
                lambda: self._losses(batch, given[self.ranks.rank], stand_in), lambda: self.call_again(batch.whole())
            )
        except Exception as exception:
            raised = exception
            self._note_exception(exception)
        # An exception of the closure makes this part unknown. A RetryError ends the step, on every rank.
        outcome = self.ranks.largest(0 if raised is None else 2 if isinstance(raised, RetryError) else 1)
        if outcome == 2:
            raise raised if isinstance(raised, RetryError) else RetryError("Retry: another rank cannot go on.")
        if outcome == 1:
            flags = self.ranks.gather(raised is not None)
            self.raised_in = {(rank, number) for rank, has_raised in enumerate(flags) if has_raised}
            return None, 0
        assert found is not None
        if own and len(given[self.ranks.rank]) > len(own) and not found.is_scalar:  # copies do not count
            weights = None if found.weights is None else found.weights[: len(own)]
            found = Losses(found.sums[: len(own)], weights)
        return found, len(own) or 1

    def _note_exception(self, exception: Exception) -> None:
        lines = str(exception).splitlines() or [""]
        self.first_exception = self.first_exception or f"{type(exception).__name__}: {lines[0][:200]}"

    def _losses(self, batch: Batch, rows: list[int], stand_in: Any) -> Losses:
        if not rows:
            if isinstance(stand_in, Exception):
                raise stand_in
            value, size = stand_in
        elif rows == [*range(batch.size)]:
            value, size = batch.whole(), batch.size
        else:
            value, size = batch.part(rows), len(rows)
        has_other_shape = self.keep_shapes and size > batch.size  # a sample beside a copy of itself
        with torch.compiler.set_stance("force_eager") if has_other_shape else NOTHING:
            found = losses_of(self.call_again(value), size)
        if self.keep_shapes and found.is_scalar and len({*rows}) < len(rows):
            raise RetryError("Retry: keep_shapes=True needs a loss for each sample, not one loss for all.")
        return found

    def _stand_in(self, batch: Batch, of_ranks: list[Any]) -> Any:
        """For a rank without samples in this part: those of the first rank that has some, and how many these are."""
        donor = next(rank for rank, rows in enumerate(of_ranks) if rows)
        sent = None
        if donor == self.ranks.rank:
            try:
                sent = map_tensors(batch.part(of_ranks[donor]), lambda tensor: tensor.detach().cpu())
            except Exception as exception:  # raised again where it is used
                sent = exception
        received = self.ranks.send(sent, donor)
        if isinstance(received, Exception):
            return received
        device = next((one.device for one in tensors_of(batch.value)), torch.device("cpu"))
        return map_tensors(received, lambda tensor: tensor.to(device)), len(of_ranks[donor])


def _dtype_of(sums: Tensor, weights: Tensor) -> torch.dtype:
    """A dtype that holds the sum of weights. The quotient of two integers has float32, whatever the losses have."""
    return torch.promote_types(torch.promote_types(sums.dtype, torch.float32), weights.dtype)


def _filled(rows: list[int], size: int) -> list[int]:
    """As many rows as there are in the whole batch: copies follow the given ones."""
    return (rows * size)[: max(size, len(rows))]


def compiled_apart(closure: Closure) -> Closure:
    """A closure compiled with dynamic sizes, beside what is compiled already.

    Dynamo stores compiled code by code object. It traces the closure and all it calls into the graph of this function,
    so nothing is added to the code of the model. Where the closure cannot be traced into one graph, it is called
    eagerly.
    """

    def call(batch: Any) -> Any:
        return closure(batch)

    compiled = torch.compile(call, dynamic=True, fullgraph=True)

    def call_compiled(batch: Any) -> Any:
        try:
            return compiled(batch)
        except tracing_errors():
            with torch.compiler.set_stance("force_eager"):
                return closure(batch)

    return call_compiled
