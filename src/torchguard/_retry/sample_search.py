"""Which samples of a batch make a step non-finite: a search that sees nothing but the outcomes of runs.

A run evaluates a part of the batch and is finite, non-finite, or unknown: a part that raised, because it is too small
for a norm or has no positive pair, says nothing about its samples. The search accuses a sample only if a finite part
became non-finite when the sample was added. It works in five steps:

1. The whole batch again. If that is finite, the fault was not reproduced, and nobody is accused.
2. A finite part: the batch without the suspects of one stage (those that show in input and loss, then in the loss, then
   in the input), else a half, a quarter and so on, or the batch without that half or quarter.
3. The rest of the batch is added to the finite part by halves. A half that leaves it finite joins it.
4. Where samples influence each other or random numbers were drawn, an accused sample has to be bad in other company,
   with other random numbers, and beside a copy of itself. If it is not, its partner is searched for, or it is not
   accused.
5. Where the losses do not show the accused, batch and good samples are run six times more: a fault that comes and goes
   with the time, and not with the samples, accuses nobody. The same is done where the losses show them, until one
   fault has been found to stay (`is_steady`).

A loss may need a partner for each sample: another one of its class, say. Then a part is non-finite because it lacks the
partner of an innocent sample. A copy of the sample is a partner, too, so a sample that only lacks one is
finite beside it. Where no part is finite for that reason, the search is made with every sample beside its copy.

Nothing here uses torch: `tests/retry/test_sample_search.py` tests it against plain models of a batch.
"""

import enum
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

Rows = tuple[int, ...]

_MAX_PARTS = 6  # parts of one size that are tried while no finite part is known
_MAX_DOUBLED = 2  # the same, with each sample beside a copy
_MAX_CHOICES = 16  # samples that are tried as the only bad one
_MAX_PAIRS = 64  # pairs of samples that are tried as each other's partner
# How often the batch and its good samples are run again where the losses do not show the bad ones. A fault that comes
# and goes, every other run at worst, passes all of these runs once in 4^6 = 4,096 times.
_REPEATS = 6
_STREAMS = (1, 2, 3, 4, 5, 6)  # random streams other than that of the step, with which an accused sample is tried
_MAX_GROUP = 4  # samples that are reported as bad only together


class Outcome(enum.Enum):
    FINITE = "finite"
    NON_FINITE = "non-finite"
    UNKNOWN = "unknown"


class Unexplained(enum.Enum):
    """Why no sample is accused although the step was not finite."""

    NOT_REPRODUCED = "the fault was not reproduced when the step was run again unchanged"
    UNSTEADY = "the fault comes and goes when the step is run again unchanged"
    MOVED = "the fault shows in other samples when the step is run again unchanged"
    RANDOM = "the fault depends on the random numbers that the step draws"
    RAISED = "the step raised an exception when it was run again unchanged"
    NO_FINITE_PART = (
        "no part of the batch that was tried is finite: too many samples are bad, or the cause is not in them"
    )
    ALL = "every sample that was tried alone is not finite: all are bad, or the cause is not in them"
    UNTRIED = "some samples could not be tried: the closure raises an exception for the parts that contain them"
    TOGETHER = "the fault needs many samples at once: no small group of them is to blame"
    LIMIT = "the limit of runs was reached before the bad samples were found"


# The whole batch may well be finite in its next run.
COMES_AND_GOES = (Unexplained.NOT_REPRODUCED, Unexplained.UNSTEADY)


class RunLimitError(Exception):
    """Raised by a run that would be one too many."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Args:
        good: the samples that remain. If `reason` is None, their run was finite.
        bad: the samples that are accused, those of `groups` included.
        groups: samples that are bad only together.
        left_out: samples that are not accused, but cannot be trained without those that are: the last of its class in a
            contrastive loss, say.
        reason: why nobody is accused.
    """

    good: Rows
    bad: Rows = ()
    groups: tuple[Rows, ...] = ()
    left_out: Rows = ()
    reason: Unexplained | None = None


@dataclass
class Search:
    """One search over the samples `rows`.

    Args:
        run: evaluates a part of the batch, given in ascending order; a sample may be in it twice. The second argument
            is the number of the random stream: 0 is that of the step, others differ from it.
        rows: all samples.
        stages: samples under suspicion, most suspicious first.
        certain: samples whose input and loss both show the fault: they are accused without step 4. Called only when
            a part is known to be finite.
        shown: samples whose losses show the fault, if not all do: these are accused without being tried once more.
        is_steady: whether earlier faults stayed when they were run again. If not, only `certain` are accused so easily.
        is_moved: whether the fault showed in other samples when the batch was run again.
        is_random: whether the step draws random numbers; known once the batch was run again.
        is_coupled: whether samples influence each other; asked after a finite run of the batch without the accused.
        min_batch: the smallest part to run.
    """

    run: Callable[[Rows, int], Outcome]
    rows: Rows
    stages: Sequence[Collection[int]] = ()
    certain: Callable[[], Collection[int]] = tuple
    shown: Collection[int] = ()
    is_steady: bool = False
    is_moved: Callable[[], bool] = lambda: False
    is_random: Callable[[], bool] = lambda: False
    is_coupled: Callable[[Rows], bool] = lambda good: True
    min_batch: int = 1
    is_doubled: bool = False  # whether a run has each sample twice
    _outcomes: dict[tuple[Rows, int], Outcome] = field(default_factory=dict)

    def find(self) -> SearchResult:
        try:
            finding = self._find()
            shown = {*(self.shown if self.is_steady else ()), *self.certain()}
            if {*finding.bad} <= shown:
                return finding
            if self._is_stable(finding.good):
                self.is_steady = True
                return finding
            return SearchResult(self.rows, reason=Unexplained.UNSTEADY)
        except RunLimitError:
            return SearchResult(self.rows, reason=Unexplained.LIMIT)

    def _find(self) -> SearchResult:
        again = self._try(self.rows)
        if again is not Outcome.NON_FINITE:
            reason = Unexplained.NOT_REPRODUCED if again is Outcome.FINITE else Unexplained.RAISED
            return SearchResult(self.rows, reason=reason)
        if self.is_moved():
            return SearchResult(self.rows, reason=Unexplained.MOVED)
        base = self._finite_part()
        if base is None and self.is_random() and any(self._is_finite(self.rows, stream) for stream in _STREAMS):
            return SearchResult(self.rows, reason=Unexplained.RANDOM)
        if base is None:
            return self._beside_copies()
        good, bad, untried = list(base), [], []
        self._add(list(self._without(base)), good, bad, untried)
        if untried and not self._is_finite([*good, *untried]):
            return SearchResult(self.rows, reason=Unexplained.UNTRIED)
        good += untried
        uncertain = [row for row in bad if row not in self.certain()]
        if not uncertain or not (self.is_random() or self.is_coupled(_sorted(good))):
            return SearchResult(_sorted(good), _sorted(bad)) if self._is_finite(good) else self._no_finite_part()
        return self._verified(bad)

    def stays_non_finite(self) -> bool:
        """Whether the batch is non-finite each time that it is run: no finite part of it has shown that it can be."""
        try:
            return all(self.run(self.rows, 0) is Outcome.NON_FINITE for _ in range(2 * _REPEATS))
        except RunLimitError:
            return False

    def _is_stable(self, good: Rows) -> bool:
        """Whether the batch stays non-finite, and the good samples finite, each time that they are run."""
        return all(
            self.run(self.rows, 0) is Outcome.NON_FINITE and self.run(good, 0) is Outcome.FINITE
            for _ in range(_REPEATS)
        )

    def _beside_copies(self) -> SearchResult:
        """Search with each sample beside a copy of itself, its partner where a loss needs one.

        Without a bad sample and its only partner left out, no part of such a batch is finite.
        """
        if self.is_doubled:
            return self._no_finite_part()
        doubled = replace(
            self, run=lambda part, stream: self._try((*part, *part), stream), is_doubled=True, _outcomes={}
        )
        doubled._outcomes[self.rows, 0] = Outcome.NON_FINITE
        finding = doubled._find()
        if not finding.bad:
            return self._no_finite_part()
        left_out = self._without_partner([*self._without(finding.bad)], finding.bad)
        good = self._without((*finding.bad, *left_out))
        if not good or not self._is_finite(good):
            return self._no_finite_part()
        return SearchResult(good, finding.bad, finding.groups, _sorted(left_out))

    def _no_finite_part(self) -> SearchResult:
        alone = {outcome for (part, _), outcome in self._outcomes.items() if len(part) == 1}
        return SearchResult(
            self.rows, reason=Unexplained.ALL if alone == {Outcome.NON_FINITE} else Unexplained.NO_FINITE_PART
        )

    def _verified(self, bad: list[int]) -> SearchResult:
        bad = self._fewest(bad)
        good = list(self._without(bad))
        groups: list[Rows] = []
        left_out: list[int] = []
        for row in [row for row in bad if row not in self.certain()]:
            if self.is_random() and not self._is_bad_for_other_draws(row, good):
                return SearchResult(self.rows, reason=Unexplained.RANDOM)
            if self._is_finite([*good, row, row]):
                left_out.append(row)
                continue
            group = self._group_of(row, good)
            if group is None:
                return SearchResult(self.rows, reason=Unexplained.TOGETHER)
            if len(group) > 1:
                good = [one for one in good if one not in group]
                if self.is_random() and not all(
                    self._is_bad_for_other_draws(row, [*good, *(one for one in group if one != row)]) for row in group
                ):
                    return SearchResult(self.rows, reason=Unexplained.RANDOM)
                groups.append(group)
        accused = {*bad, *(row for group in groups for row in group)} - {*left_out}
        if not accused:
            return self._no_finite_part()
        left_out = self._without_partner(left_out, accused)
        good = [row for row in self._without(accused) if row not in left_out]
        if not self._is_finite(good):
            return self._no_finite_part()
        # A group that was found later may have made an earlier sample bad: each has to be bad without it, too.
        for row in _sorted(accused.difference(self.certain(), *groups)):
            if self._is_finite([*good, row]):
                good.append(row)
            elif self._is_finite([*good, row, row]):
                left_out.append(row)
            else:
                continue
            accused.discard(row)
        return SearchResult(_sorted(good), _sorted(accused), tuple(groups), _sorted(left_out))

    def _without_partner(self, rows: list[int], accused: Collection[int]) -> list[int]:
        """Those of `rows` that make the batch without the accused non-finite unless a copy is beside them."""
        others = self._without(accused)
        if not rows or self._is_finite(others):
            return []
        lonely = [row for row in rows if not self._is_finite([*others, *(one for one in rows if one != row)])]
        return lonely if self._is_finite([row for row in others if row not in lonely]) else rows

    def _try(self, rows: Iterable[int], stream: int = 0) -> Outcome:
        part = _sorted(rows)
        if len(part) < self.min_batch:
            return Outcome.UNKNOWN
        key = part, stream
        if key not in self._outcomes:
            self._outcomes[key] = self.run(part, stream)
        return self._outcomes[key]

    def _is_finite(self, rows: Iterable[int], stream: int = 0) -> bool:
        return self._try(rows, stream) is Outcome.FINITE

    # 2. A finite part.

    def _finite_part(self) -> Rows | None:
        for stage in self.stages:
            rest = self._without(stage)
            if stage and rest and self._is_finite(rest):
                return rest
        size = len(self.rows)
        while size > 1:
            size = (size + 1) // 2
            for part in self._parts(size):
                for tried in (part, self._without(part)) if 4 * size >= len(self.rows) else (part,):
                    if tried and self._is_finite(tried):
                        return tried
        tried = self.rows[:_MAX_CHOICES]
        return next((rest for row in tried if (rest := self._without((row,))) and self._is_finite(rest)), None)

    def _parts(self, size: int) -> list[Rows]:
        """Some parts of this size, spread over the batch."""
        parts = [self.rows[start : start + size] for start in range(0, len(self.rows), size)]
        most = _MAX_DOUBLED if self.is_doubled else _MAX_PARTS
        return parts[:: max(1, len(parts) // most)][:most]

    def _without(self, rows: Collection[int]) -> Rows:
        left_out = set(rows)
        return tuple(row for row in self.rows if row not in left_out)

    # 3. The rest, by halves.

    def _add(self, rows: list[int], good: list[int], bad: list[int], untried: list[int]) -> None:
        """Sort samples into those that leave `good` finite, which join it, and those that do not.

        `good` with all of `rows` is not finite. A sample whose run is unknown is in neither.
        """
        if len(rows) == 1:
            lists = {Outcome.FINITE: good, Outcome.NON_FINITE: bad, Outcome.UNKNOWN: untried}
            lists[self._try([*good, *rows])] += rows
            return
        first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
        if self._is_finite([*good, *first]):
            good += first
            self._add(second, good, bad, untried)  # which is not finite: the first half did not change that
            return
        self._add(first, good, bad, untried)
        if self._is_finite([*good, *second]):
            good += second
        else:
            self._add(second, good, bad, untried)

    # 4. Other company, other random numbers.

    def _fewest(self, bad: list[int]) -> list[int]:
        """Fewer of these samples without which the batch is finite, where that is so.

        A sample that has no partner in a part, such as the only one of its class, makes that part non-finite, so the
        halves may have accused more samples than needed: all but one of them, or pairs that are each other's partner.
        """
        for row in bad[:_MAX_CHOICES] if len(bad) > 1 else ():
            if self._is_finite(self._without((row,))):
                return [row]
        left = [row for row in bad if row not in self.certain()]
        for pair in itertools.islice(itertools.combinations(left, 2), _MAX_PAIRS):
            if {*pair} <= {*bad} and len(bad) > 2 and self._is_finite([*self._without(bad), *pair]):
                bad = [row for row in bad if row not in pair]
        return bad

    def _is_bad_for_other_draws(self, row: int, good: list[int]) -> bool:
        return all(
            self._is_finite(good, stream) and self._try([*good, row], stream) is Outcome.NON_FINITE
            for stream in _STREAMS
        )

    def _group_of(self, row: int, good: list[int]) -> Rows | None:
        """The smallest group with `row` that is bad together; `(row,)` if it is bad in any company.

        None if the group is larger than `_MAX_GROUP`.
        """
        group = [row]
        while len(group) <= _MAX_GROUP:
            others = [one for one in good if one not in group]
            partner = self._partner(group, others)
            if partner is None:
                return _sorted(group)
            group.append(partner)
        return None

    def _partner(self, group: list[int], others: list[int]) -> int | None:
        """A sample without which `group` is finite among the others. None if no single one is needed."""
        needed = others
        while True:
            half = len(needed) // 2
            halves = (needed[:half], needed[half:])
            found = next((part for part in halves if part and self._is_finite(_left(group, others, part))), None)
            if found is None or len(found) == 1:
                return found[0] if found else None
            needed = found


def _left(group: list[int], others: list[int], part: list[int]) -> list[int]:
    left_out = set(part)
    return [*group, *(one for one in others if one not in left_out)]


def _sorted(rows: Iterable[int]) -> Rows:
    return tuple(sorted(rows))
