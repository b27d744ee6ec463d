"""Flags of several ranks: merged, gathered, decided upon and counted. Everything runs on real gloo processes."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # before processes are forked, not in each of them
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.distributed.cases import everything, flags_with

from torchguard import ErrorConfig, ErrorLocation, distributed, err, flags
from torchguard.distributed import _digest
from torchguard.exceptions import BatchMismatchError, DistributedError, NotFlagsError, OutOfRangeError
from torchguard.testing import run_ranks

BAD = [[], [1], [0, 3], []]


def own_flags():
    """Rank 0 has 2 samples, rank 1 has 3, and so on. Ranks 1 and 2 have bad ones."""
    rank = dist.get_rank()
    return flags_with(2 + rank, BAD[rank])


class TestWithoutOthers:
    def test_everything_is_local_without_a_process_group(self):
        f = flags_with(3, [1])
        assert torch.equal(distributed.merge_flags(f), f)
        assert distributed.any_err(f)
        assert not distributed.any_err(err.new_t(2))
        assert distributed.agree(f, "majority")
        assert distributed.mean_ok(f, torch.tensor([1.0, float("nan"), 3.0])) == 2
        gathered = distributed.gather_flags(f)
        assert torch.equal(gathered.flags, f)
        assert gathered.global_samples.tolist() == [0, 1, 2]
        assert distributed.gather_flags(f, rows=4).samples.tolist() == [0, 1, 2, -1]
        assert str(distributed.digest(f)).startswith("1 of 3 samples are bad, on 1 rank (1xNAN)")
        assert str(distributed.digest(err.new_t(0))) == "0 samples, no errors"

    def test_a_group_of_one_rank(self):
        def alone():
            f = own_flags()
            group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            return torch.equal(distributed.merge_flags(f, group), f), bool(distributed.any_err(f, group))

        assert run_ranks(alone) == [(True, False), (True, True)]

    @pytest.mark.wrong_types
    def test_bad_arguments(self):
        f = err.new_t(3)
        with pytest.raises(OutOfRangeError, match="'most'"):
            distributed.agree(f, "most")
        for policy in (0, 1.5, True):
            with pytest.raises(OutOfRangeError, match="policy is"):
                distributed.agree(f, policy)
        with pytest.raises(BatchMismatchError, match="3 samples and rows is 2"):
            distributed.gather_flags(f, rows=2)
        with pytest.raises(NotFlagsError):
            distributed.any_err(torch.zeros(3))
        with pytest.raises(DistributedError, match="no process group"):
            distributed.any_err(f, group=object())


class TestDecisions:
    def test_every_rank_gets_the_same_decision(self):
        policies = ["any", "majority", 0.25, 0.5, 0.51, 1.0]
        found = run_ranks(lambda: [bool(distributed.agree(own_flags(), policy)) for policy in policies], size=4)
        assert found == [[True, False, True, True, False, False]] * 4

    def test_three_ranks(self):
        """Ranks 1 and 2 of 3 are a majority; a third of three is one rank, whatever 3 * (1 / 3) rounds to."""
        policies = ["majority", 1 / 3, 2 / 3, 0.7]
        found = run_ranks(lambda: [bool(distributed.agree(own_flags(), policy)) for policy in policies], size=3)
        assert found == [[True, True, True, False]] * 3

    def test_a_vote_of_the_user(self):
        def vote():
            is_first = dist.get_rank() == 0
            return bool(distributed.agree(is_first)), bool(distributed.any_err(torch.tensor(is_first)))

        assert run_ranks(vote) == [(True, True)] * 2

    def test_different_policies_are_an_error_on_every_rank(self):
        def decide():
            try:
                distributed.agree(own_flags(), "any" if dist.get_rank() else "majority")
            except distributed.RankMismatchError as error:
                return str(error)

        assert all("different policies" in message for message in run_ranks(decide, size=4))

    @pytest.mark.long
    @pytest.mark.compiled
    def test_different_policies_in_a_graph_are_a_yes_on_every_rank(self):
        def decide():
            policy = "any" if dist.get_rank() else "majority"
            compiled = torch.compile(lambda f: distributed.agree(f, policy), backend="eager", fullgraph=True)
            return bool(compiled(err.new_t(2)))

        assert run_ranks(decide) == [True, True]

    def test_other_groups_than_all_ranks(self):
        """Two groups at once, one of them in another order."""

        def decide():
            pair = [dist.new_group([0, 1]), dist.new_group([3, 2])][dist.get_rank() // 2]
            mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            f = flags_with(2, [0] if dist.get_rank() == 1 else [])
            return [bool(distributed.any_err(f, group)) for group in (pair, mesh["dp"], mesh["tp"])]

        assert run_ranks(decide, size=4) == [
            [True, False, True],
            [True, True, True],
            [False, False, False],
            [False, True, False],
        ]

    @pytest.mark.wrong_types
    def test_ranks_outside_of_the_group_are_told(self):
        def decide():
            group = dist.new_group([0])
            try:
                return bool(distributed.any_err(own_flags(), group))
            except DistributedError as error:
                return str(error)

        alone, outside = run_ranks(decide)
        assert alone is False
        assert "this rank is in" in outside

    def test_a_mesh_of_two_dims_is_refused(self):
        def decide():
            mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
            try:
                distributed.any_err(own_flags(), mesh)
            except DistributedError as error:
                return str(error)

        assert all("mesh['dp']" in message for message in run_ranks(decide))


class TestGathering:
    def test_uneven_batches(self):
        def gather():
            found = distributed.gather_flags(own_flags())
            bad = err.is_err(found.flags)
            return [x[bad].tolist() for x in found[1:]], found.flags.shape[0]

        assert run_ranks(gather, size=4) == [([[1, 2, 2], [1, 0, 3], [3, 5, 8]], 14)] * 4

    def test_a_rank_with_an_empty_batch(self):
        def gather():
            f = flags_with(2, [1]) if dist.get_rank() else flags_with(0, [])
            found = distributed.gather_flags(f)
            return found.ranks.tolist(), found.global_samples.tolist(), str(distributed.digest(f))

        ranks, samples, digest = run_ranks(gather)[0]
        assert (ranks, samples) == ([1, 1], [0, 1])
        assert digest.startswith("1 of 2 samples are bad, on 1 rank (1xNAN); the first is rank 1, sample 1: NAN at enc")

    def test_all_batches_empty(self):
        found = run_ranks(lambda: distributed.gather_flags(err.new_t(0)).flags.shape[0], size=2)
        assert found == [0, 0]

    def test_carriers(self, carrier):
        config = ErrorConfig(num_slots=5, flag_dtype=carrier)

        def gather():
            f = flags_with(2, [dist.get_rank()], config=config)
            merged = distributed.merge_flags(f, config=config)
            gathered = distributed.gather_flags(f, rows=3).flags
            assert merged.dtype == gathered.dtype == carrier
            return [len(errors) for errors in flags.unpack_all(merged)], [len(e) for e in flags.unpack_all(gathered)]

        assert run_ranks(gather) == [([1, 1], [1, 0, 0, 0, 1, 0])] * 2

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda rank: err.new_t(2, config=ErrorConfig(num_slots=4 + 8 * rank)), "rank 0 has 1, rank 1 has 3"),
            (lambda rank: err.new_t(2, config=ErrorConfig(flag_dtype=[torch.int64, torch.int32][rank])), "torch.int32"),
        ],
    )
    def test_different_configs_are_an_error_on_every_rank(self, make, message):
        def gather():
            found = []
            for function in (distributed.gather_flags, distributed.merge_flags):
                try:
                    function(make(dist.get_rank()))
                except distributed.RankMismatchError as error:
                    found.append(str(error))
            return found

        for of_rank in run_ranks(gather):
            assert len(of_rank) == 2
            assert all(message in text and "Use one ErrorConfig" in text for text in of_rank)

    def test_a_batch_with_more_samples_than_rows_is_an_error_on_every_rank(self):
        def gather():
            try:
                distributed.gather_flags(own_flags(), rows=2)
            except BatchMismatchError as error:
                return str(error)

        assert run_ranks(gather) == ["gather_flags: a batch has 3 samples and rows is 2. Give more rows."] * 2

    def test_merging_takes_the_same_samples(self):
        def merge():
            try:
                distributed.merge_flags(own_flags())
            except distributed.RankMismatchError as error:
                return str(error)

        assert all("rank 0 has 2, rank 1 has 3. Ranks with different samples" in text for text in run_ranks(merge))

    def test_merged_flags_have_the_errors_of_every_rank(self):
        def merge():
            f = flags_with(3, [dist.get_rank()], f"block.{dist.get_rank()}")
            f = err.push(f, err.INF, ErrorLocation.register("head"), where=torch.tensor([False, False, True]))
            return [[str(error) for error in errors] for errors in flags.unpack_all(distributed.merge_flags(f))]

        first, second = run_ranks(merge)
        assert first == [["CRITICAL: NAN @ block.0"], ["CRITICAL: NAN @ block.1"], ["CRITICAL: INF @ head"]]
        assert second == first

    def test_ids_that_stand_for_other_locations_on_other_ranks(self):
        """A rank that registers more names, or in another order, has other ids. Names are what counts."""

        def gather():
            rank = dist.get_rank()
            for name in ("a", "b", "c") if rank else ("c", "a"):
                ErrorLocation.register(name)
            found = distributed.gather_flags(flags_with(1, [0], ["c", "b"][rank]))
            digest = distributed.digest(flags_with(1, [0], ["c", "b"][rank]))
            return [flags.unpack(found.flags, i)[0].location_name for i in range(2)], str(digest)

        for names, digest in run_ranks(gather):
            assert names == ["c", "b"]
            assert "of that rank" in digest


class TestDigest:
    def test_it_counts_and_names_the_first(self):
        def digest():
            f = own_flags()
            if dist.get_rank() == 3:
                f = err.push(f, err.OOB, ErrorLocation.register("embed"))
            return str(distributed.digest(f, step=12))

        counts = "8 of 14 samples are bad, on 3 ranks (3xNAN, 5xOUT_OF_BOUNDS)"
        start = f"step 12: {counts}; the first is rank 1, sample 1: NAN at "
        assert all(text.startswith(start) for text in run_ranks(digest, size=4))

    def test_ranks_at_different_steps_are_told(self):
        def digest():
            try:
                distributed.digest(own_flags(), step=7 + dist.get_rank())
            except distributed.RankMismatchError as error:
                return str(error)

        start = "digest: the ranks are at different steps. This one is at"
        assert run_ranks(digest) == [f"{start} 7.", f"{start} 8."]

    @given(st.data())
    def test_the_first_of_many_ranks(self, data):
        """What the sum over many ranks holds, added in any order, against a plain loop."""
        size = data.draw(st.integers(1, 400))
        numbers = st.sampled_from([0, 0, 1, 2**42 - 1]) | st.integers(0, 2**42 - 1)
        keys = data.draw(st.lists(numbers, min_size=size, max_size=size))
        rows = [_digest._powers(torch.tensor(key), rank, size) for rank, key in enumerate(keys)]
        data.draw(st.randoms(use_true_random=False)).shuffle(rows)
        rank, key = _digest._decoded(functools.reduce(torch.add, rows))
        expected = next(((rank, key) for rank, key in enumerate(keys) if key), None)
        assert int(key) == (expected[1] if expected else 0)
        assert expected is None or int(rank) == expected[0]

    def test_all_of_many_ranks_are_bad(self):
        size = 4_096
        worst = torch.stack([_digest._powers(torch.tensor(2**42 - 1), rank, size) for rank in range(size)]).sum(0)
        assert [int(one) for one in _digest._decoded(worst)] == [0, 2**42 - 1]


def is_same_in_one_graph(backend):
    """Whether a graph of uneven batches computes what eager mode does, bit by bit, and the same gradients."""
    f = own_flags()
    losses = torch.rand(len(f), dtype=torch.float64, requires_grad=True)
    x = torch.rand(2, 3, requires_grad=True)
    results = []
    for function in (everything, torch.compile(everything, backend=backend, fullgraph=True)):
        out = function(f, losses, x, torch.tensor(3))
        (out[-2] + out[-1].square().sum()).backward()
        results.append([*(one.detach() for one in out), losses.grad, x.grad])
        losses.grad = x.grad = None
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.compiled
def test_in_one_graph():
    assert run_ranks(is_same_in_one_graph, "aot_eager", timeout=100) == [True, True]


@pytest.mark.long
@pytest.mark.compiled
def test_in_one_graph_on_inductor():
    """In a process of its own: ranks are forked, and may wait forever for threads that Inductor started before.

    Inductor's first kernel takes a minute, in which C++ headers are compiled: here once for all ranks.
    """
    script = (
        "import torch; from torchguard.testing import run_ranks; torch.compile(torch.sin)(torch.ones(3)); "
        "from tests.distributed.test_flags import is_same_in_one_graph as is_same; "
        "assert run_ranks(is_same, 'inductor', timeout=300) == [True, True]"
    )
    subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=True, timeout=400)
