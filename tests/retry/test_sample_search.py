"""The search for bad samples, against plain models of a batch: who is accused, what is left, how many runs."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchguard._retry.sample_search import Outcome, RunLimitError, Search, SearchResult, Unexplained


@dataclass
class Model:
    """A batch whose faults are known.

    Args:
        size: the number of samples.
        faults: sets of samples that make every part non-finite which contains all of them.
        classes: for each sample its class, if a class with one sample in a part makes that part non-finite.
        smallest: parts with fewer samples raise an exception.
        raising: samples that raise an exception in parts of less than half of the batch.
        draws: the probability that a part is non-finite by its random numbers.
        seed: of these random numbers.
        limit: the most runs.
    """

    size: int
    faults: Sequence[frozenset[int]] = ()
    classes: Sequence[int] | None = None
    smallest: int = 1
    raising: frozenset[int] = frozenset()
    draws: float = 0.0
    seed: int = 0
    limit: int = 10_000
    parts: list[tuple[int, ...]] = field(default_factory=list)

    def run(self, part: tuple[int, ...], stream: int = 0) -> Outcome:
        if len(self.parts) >= self.limit:
            raise RunLimitError
        assert part
        assert list(part) == sorted(part)
        self.parts.append(part)
        if len(part) < self.smallest or ({*part} & self.raising and len({*part}) < self.size / 2):
            return Outcome.UNKNOWN
        if any(fault <= {*part} for fault in self.faults) or self._has_lonely(part):
            return Outcome.NON_FINITE
        if self.draws and random.Random(str((part, stream, self.seed))).random() < self.draws:
            return Outcome.NON_FINITE
        return Outcome.FINITE

    def _has_lonely(self, part: tuple[int, ...]) -> bool:
        return self.classes is not None and 1 in Counter(self.classes[row] for row in part).values()

    def find(self, **options) -> SearchResult:
        return Search(self.run, tuple(range(self.size)), is_random=lambda: self.draws > 0, **options).find()


def sets(size: int, smallest: int, largest: int, most: int = 4):
    rows = st.frozensets(st.integers(0, size - 1), min_size=smallest, max_size=largest)
    return st.lists(rows, max_size=most)


@st.composite
def models(draw, largest_fault=3, with_classes=True):
    size = draw(st.integers(2, 24))
    faults = draw(sets(size, 1, min(largest_fault, size)))
    classes = None
    if with_classes and draw(st.booleans()):
        classes = draw(st.lists(st.integers(0, max(0, size // 3)), min_size=size, max_size=size))
    smallest = draw(st.integers(1, 3))
    return Model(size, faults, classes, smallest)


@given(st.integers(2, 40).flatmap(lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), min_size=1))))
def test_independent_bad_samples_are_found_exactly(given_):
    size, bad = given_
    model = Model(size, [frozenset([row]) for row in bad])
    finding = model.find(is_coupled=lambda good: False)
    if len(bad) == size:
        assert finding.reason is Unexplained.ALL
        assert not finding.bad
    elif finding.reason is None:
        assert finding.bad == tuple(sorted(bad))
        assert finding.good == tuple(row for row in range(size) if row not in bad)
    else:  # too many to find a finite part among those that were tried
        assert finding.reason in (Unexplained.ALL, Unexplained.NO_FINITE_PART)
        assert len(bad) > 4


@given(models())
def test_only_samples_of_a_fault_are_accused(model):
    finding = model.find()
    assert {*finding.bad} <= {row for fault in model.faults for row in fault}


@given(models())
def test_the_part_that_remains_is_finite(model):
    finding = model.find()
    if finding.reason in (None, Unexplained.NOT_REPRODUCED):
        assert model.run(finding.good) is Outcome.FINITE
        assert {*finding.good}.isdisjoint(finding.bad)
        assert {*finding.good} | {*finding.bad} | {*finding.left_out} == {*range(model.size)}
    else:
        assert not finding.bad


@given(models())
def test_a_part_is_run_once_and_the_result_six_times_more(model):
    good = model.find().good
    searched = [part for part in model.parts if part not in (tuple(range(model.size)), good)]
    assert len(searched) == len({*searched})
    assert len(model.parts) - len({*model.parts}) <= 12


@given(models(), st.integers(1, 30))
def test_the_limit_of_runs_holds_and_nobody_is_accused_when_it_is_reached(model, limit):
    model.limit = limit
    finding = model.find()
    assert len(model.parts) <= limit
    assert not finding.bad or finding.reason is None


@given(st.integers(8, 512), st.data())
def test_few_bad_samples_take_about_two_runs_for_each_halving(size, data):
    bad = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=3))
    model = Model(size, [frozenset([row]) for row in bad])
    assert model.find(is_coupled=lambda good: False).bad == tuple(sorted(bad))
    assert len(model.parts) <= 20 + 2 * len(bad) * math.ceil(math.log2(size)) + 2 * len(bad)


def test_a_sample_that_shows_takes_two_runs_more_than_the_first_and_one_to_prove_it_is_the_first_again():
    model = Model(8, [frozenset([3])])
    finding = model.find(stages=[[3]], certain=lambda: [3])
    assert finding.bad == (3,)
    assert model.parts == [tuple(range(8)), (0, 1, 2, 4, 5, 6, 7)]


@given(st.integers(4, 24), st.data())
def test_an_innocent_suspect_is_not_accused(size, data):
    bad = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=2))
    suspects = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    model = Model(size, [frozenset([row]) for row in bad])
    finding = model.find(stages=[sorted(suspects)], certain=lambda: suspects)
    assert {*finding.bad} <= bad


@given(st.integers(4, 24), st.data())
def test_samples_that_are_bad_only_together_are_a_group(size, data):
    group = data.draw(st.frozensets(st.integers(0, size - 1), min_size=2, max_size=4))
    finding = Model(size, [group]).find()
    if finding.reason is None:
        assert finding.groups == (tuple(sorted(group)),)
        assert finding.bad == tuple(sorted(group))
    else:
        assert len(group) == size  # without one of them nobody is left to compare with


def test_a_fault_of_very_many_samples_together_accuses_nobody():
    finding = Model(12, [frozenset(range(9))]).find()
    assert finding.reason is Unexplained.TOGETHER
    assert not finding.bad


@pytest.mark.parametrize("per_class", [2, 3])
@given(classes=st.integers(3, 8), data=st.data())
def test_the_last_of_a_class_is_left_out_but_not_accused(per_class, classes, data):
    size = per_class * classes
    bad = data.draw(st.integers(0, size - 1))
    finding = Model(size, [frozenset([bad])], [row % classes for row in range(size)]).find()
    partners = tuple(row for row in range(bad % classes, size, classes) if row != bad)
    assert (finding.bad, finding.left_out) == ((bad,), partners if len(partners) == 1 else ())


@pytest.mark.parametrize("draws", [0.02, 0.1, 0.3, 0.5, 0.8])
def test_a_fault_that_random_numbers_decide_accuses_nobody(draws):
    accused = 0
    for seed in range(100):
        rng = random.Random(seed)
        size = rng.randint(2, 24)
        faults = [frozenset([rng.randrange(size)]) for _ in range(rng.randint(0, 2))]
        finding = Model(size, faults, draws=draws, seed=seed).find()
        accused += not {*finding.bad} <= {row for fault in faults for row in fault}
    assert accused == 0


def test_a_fault_that_is_not_reproduced_accuses_nobody():
    finding = Model(4).find()
    assert finding == SearchResult((0, 1, 2, 3), reason=Unexplained.NOT_REPRODUCED)


def test_a_fault_that_shows_elsewhere_when_it_is_run_again_accuses_nobody():
    finding = Model(8, [frozenset([3])]).find(stages=[[3]], shown=[3], is_moved=lambda: True)
    assert (finding.bad, finding.reason) == ((), Unexplained.MOVED)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_fault_that_comes_and_goes_is_not_blamed_on_samples(share):
    source = random.Random(0)
    for _ in range(400):
        size = source.randint(2, 24)
        search = Search(lambda *_: Outcome.NON_FINITE if source.random() < share else Outcome.FINITE, (*range(size),))
        assert not search.find().bad


def test_a_fault_that_shows_is_tried_again_until_one_has_stayed():
    runs = []
    for is_steady in (False, True):
        model = Model(8, [frozenset([3])])
        assert model.find(stages=[[3]], shown=[3], is_steady=is_steady).bad == (3,)
        runs.append(len(model.parts))
    assert runs[0] == runs[1] + 12


@given(models(largest_fault=1, with_classes=False), st.data())
def test_samples_that_raise_in_small_parts_are_not_accused_for_it(model, data):
    model.raising = frozenset(data.draw(st.sets(st.integers(0, model.size - 1), max_size=3)))
    finding = model.find()
    assert {*finding.bad} <= {row for fault in model.faults for row in fault}


@given(models(largest_fault=2), st.integers(1, 6))
def test_no_part_smaller_than_min_batch_is_run(model, min_batch):
    model.find(min_batch=min_batch)
    assert all(len(part) >= min_batch for part in model.parts)


@pytest.mark.parametrize("size", [1, 2, 6, 64, 1000])
def test_a_batch_of_bad_samples_alone_accuses_nobody_within_the_default_limit(size):
    finding = Model(size, [frozenset([row]) for row in range(size)], limit=198).find()
    assert (finding.reason, finding.bad) == (Unexplained.ALL, ())
