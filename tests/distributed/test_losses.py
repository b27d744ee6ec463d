"""Losses and gradients of several ranks are those of one process with all of their samples."""

import contextlib
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchguard import distributed, err
from torchguard.exceptions import BatchMismatchError, DistributedError
from torchguard.testing import run_ranks

NAN = float("nan")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch_of(rank, size=None):
    return torch.randn(2 + rank if size is None else size, 3, generator=torch.Generator().manual_seed(rank)).double()


def gradients(module):
    return [one.grad for one in module.parameters()]


def close(found, wanted):
    return all(torch.allclose(one, two, rtol=1e-9, atol=1e-12) for one, two in zip(found, wanted, strict=True))


class TestMeanOk:
    # Which samples of which rank are bad; rank r has r + 2 of them.
    @pytest.mark.parametrize(
        "bad",
        [[[], [], [], []], [[1], [], [0, 2], []], [[0, 1], [], [], [4]], [[0, 1], [0, 1, 2], [*range(4)], [*range(5)]]],
    )
    def test_under_ddp(self, bad):
        def train():
            rank = dist.get_rank()
            x, parallel = batch_of(rank), DistributedDataParallel(model())
            where = torch.zeros(len(x), dtype=torch.bool)
            where[bad[rank]] = True
            f = err.push(err.new(x), err.NAN, 1, where=where)
            loss = distributed.mean_ok(f, parallel(x).square().sum(-1))
            loss.backward()
            return loss.item(), gradients(parallel)

        single = model()
        good = [batch_of(rank)[[i for i in range(2 + rank) if i not in bad[rank]]] for rank in range(4)]
        losses = single(torch.cat(good)).square().sum(-1)
        loss = losses.mean() if len(losses) else 0 * single(batch_of(0)).sum()
        loss.backward()
        for value, grads in run_ranks(train, size=4):
            assert value == pytest.approx(loss.item(), rel=1e-12)
            assert close(grads, gradients(single))

    def test_gradients_accumulated_in_no_sync(self):
        """Two micro-batches with other bad samples: the sum of the two means, as in one process."""
        bad = [[[1], [0, 1, 2]], [[], [2]]]  # of each micro-batch and rank

        def train():
            rank, parallel = dist.get_rank(), DistributedDataParallel(model())
            for number, context in enumerate((parallel.no_sync(), contextlib.nullcontext())):
                x = batch_of(rank, 3 + rank) + number
                f = err.push(
                    err.new(x), err.NAN, 1, where=torch.isin(torch.arange(len(x)), torch.tensor(bad[number][rank]))
                )
                with context:
                    distributed.mean_ok(f, parallel(x).square().sum(-1)).backward()
            return gradients(parallel)

        single = model()
        for number, of_ranks in enumerate(bad):
            rows = [
                batch_of(rank, 3 + rank)[[i for i in range(3 + rank) if i not in some]] + number
                for rank, some in enumerate(of_ranks)
            ]
            single(torch.cat(rows)).square().sum(-1).mean().backward()
        assert all(close(grads, gradients(single)) for grads in run_ranks(train))

    def test_loaders_of_different_lengths(self):
        """A rank that has no batch left takes an empty one, for as long as another has one."""

        def train():
            rank, parallel = dist.get_rank(), DistributedDataParallel(model())
            loader, steps = iter([batch_of(rank) + number for number in range(1 + rank)]), 0
            while distributed.agree((x := next(loader, None)) is not None):
                x = batch_of(rank, 0) if x is None else x
                distributed.mean_ok(err.new(x), parallel(x).square().sum(-1)).backward()
                steps += 1
            return steps, gradients(parallel)

        single = model()
        single(torch.cat([batch_of(0), batch_of(1)])).square().sum(-1).mean().backward()
        single(batch_of(1) + 1).square().sum(-1).mean().backward()
        for steps, grads in run_ranks(train):
            assert steps == 2
            assert close(grads, gradients(single))

    def test_ranks_with_an_empty_batch(self):
        def train():
            parallel = DistributedDataParallel(model())
            x = batch_of(0) if dist.get_rank() == 0 else torch.zeros(0, 3, dtype=torch.float64)
            loss = distributed.mean_ok(err.new(x), parallel(x).square().sum(-1))
            loss.backward()
            return loss.item(), gradients(parallel)

        single = model()
        single(batch_of(0)).square().sum(-1).mean().backward()
        assert all(close(grads, gradients(single)) for _, grads in run_ranks(train, size=3))

    def test_half_precision_and_losses_per_token(self):
        def train():
            losses = torch.ones(2 + dist.get_rank(), 3, dtype=torch.bfloat16, requires_grad=True)
            loss = distributed.mean_ok(err.new(losses), losses)
            loss.backward()
            return loss.dtype, loss.item(), losses.grad.sum().item()

        first, second = run_ranks(train)
        assert first[:2] == second[:2] == (torch.bfloat16, 1)
        assert (first[2] + second[2]) / 2 == pytest.approx(1, rel=1e-2)

    def test_the_gradient_of_a_function_of_the_loss(self):
        """The value is the same on all ranks, so a function of it has the gradient of one process as well."""

        def train():
            parallel, x = DistributedDataParallel(model()), batch_of(dist.get_rank())
            distributed.mean_ok(err.new(x), parallel(x).square().sum(-1)).exp().backward()
            return gradients(parallel)

        single = model()
        single(torch.cat([batch_of(0), batch_of(1)])).square().sum(-1).mean().exp().backward()
        assert all(close(grads, gradients(single)) for grads in run_ranks(train))


class Pair(NamedTuple):
    x: torch.Tensor
    ids: torch.Tensor


class TestAllGather:
    @pytest.mark.parametrize("sizes", [[2, 2, 2], [1, 3, 2], [0, 2, 0]])
    def test_gradients_of_every_rank_are_kept(self, sizes):
        def gather():
            rank = dist.get_rank()
            x = batch_of(rank, sizes[rank]).requires_grad_()
            found = distributed.all_gather(x)
            ((rank + 1) * found.square().sum()).backward()
            return found.detach(), x.detach(), x.grad

        found = run_ranks(gather, size=3)
        whole = torch.cat([x for _, x, _ in found])
        for all_rows, x, grad in found:
            assert torch.equal(all_rows, whole)
            assert torch.allclose(grad, 6 * 2 * x)  # 1 + 2 + 3 ranks

    def test_second_derivatives_of_every_rank_are_kept(self):
        """As a gradient penalty needs them."""

        def gather():
            x = batch_of(dist.get_rank(), 1 + dist.get_rank()).requires_grad_()
            (grad,) = torch.autograd.grad(distributed.all_gather(x).pow(3).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(grad.sum(), x)
            return torch.allclose(second, 2 * 6 * x)  # of two ranks

        assert run_ranks(gather) == [True, True]

    def test_a_rank_whose_tensor_needs_no_gradient_takes_part_in_backward(self):
        def gather():
            x = torch.ones(2, requires_grad=dist.get_rank() == 0)
            distributed.all_gather(x).sum().backward()
            return None if x.grad is None else x.grad.tolist()

        assert run_ranks(gather) == [[2, 2], None]

    @pytest.mark.parametrize(
        "dtype", [torch.bool, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.complex64]
    )
    def test_dtypes(self, dtype):
        def gather():
            return distributed.all_gather(torch.full((1 + dist.get_rank(), 2), dist.get_rank(), dtype=dtype))

        want = torch.tensor([[0, 0], [1, 1], [1, 1]]).to(dtype)
        assert all(torch.equal(found, want) for found in run_ranks(gather))

    def test_named_tuples_and_scalars(self):
        def gather():
            rank = dist.get_rank()
            pair = distributed.all_gather(Pair(torch.full((1, 2), float(rank)), torch.tensor([rank])))
            return type(pair) is Pair, pair.ids.tolist(), distributed.all_gather(torch.tensor(rank)).tolist()

        assert run_ranks(gather) == [(True, [0, 1], [0, 1])] * 2

    def test_tensors_that_do_not_go_together_are_an_error_on_every_rank(self):
        def gather():
            found = []
            for x in (
                torch.ones(2, 3 + dist.get_rank()),
                torch.ones(2, dtype=[torch.float32, torch.float64][dist.get_rank()]),
            ):
                try:
                    distributed.all_gather(x)
                except distributed.RankMismatchError as error:
                    found.append(str(error))
            return found

        for shape, dtype in run_ranks(gather):
            assert "rank 0 has (rows, 3), rank 1 has (rows, 4)" in shape
            assert "rank 1 has torch.float64" in dtype

    def test_without_a_process_group(self):
        x = torch.ones(2, 3)
        assert distributed.all_gather(x) is x


class TestLossOverAllSamples:
    def test_a_contrastive_loss_under_ddp(self):
        def contrastive(x, y):
            logits = nn.functional.normalize(x, dim=-1) @ nn.functional.normalize(y, dim=-1).mT
            return nn.functional.cross_entropy(logits, torch.arange(len(x)))

        def train():
            rank = dist.get_rank()
            parallel, x = DistributedDataParallel(model()), batch_of(rank)
            y = parallel(x)
            loss = distributed.calculate_loss_distributed(y, y.roll(1, -1), contrastive)
            loss.backward()
            return loss.item(), gradients(parallel)

        single = model()
        y = single(torch.cat([batch_of(rank) for rank in range(3)]))
        loss = contrastive(y, y.roll(1, -1))
        loss.backward()
        for value, grads in run_ranks(train, size=3):
            assert value == pytest.approx(loss.item(), rel=1e-12)
            assert close(grads, gradients(single))

    @pytest.mark.wrong_types
    def test_rows_that_do_not_match(self):
        with pytest.raises(BatchMismatchError, match="one row a sample"):
            distributed.calculate_loss_distributed(torch.ones(2, 3), torch.ones(3, 3))


class TestAveraging:
    def test_gradients_as_ddp_averages_them(self):
        def train():
            rank = dist.get_rank()
            own, parallel = model(), DistributedDataParallel(model())
            for one in (own, parallel):
                one(batch_of(rank)).square().mean().backward()
            distributed.average_gradients(own)
            return close(gradients(own), gradients(parallel))

        assert run_ranks(train, size=3) == [True] * 3

    def test_parameters_without_a_gradient_on_some_ranks(self):
        def train():
            own = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(3))
            own[dist.get_rank()].weight.grad = torch.full((1, 1), 4.0)
            distributed.average_gradients(own)
            return [None if one.grad is None else one.grad.item() for one in own.parameters()]

        assert run_ranks(train) == [[2.0, 2.0, None]] * 2

    def test_different_models_are_an_error_on_every_rank(self):
        def train():
            messages = []
            for own in (
                nn.Linear(2 + dist.get_rank(), 1),
                nn.Sequential(*(nn.Linear(1, 1) for _ in range(1 + dist.get_rank()))),
            ):
                try:
                    distributed.average_gradients(own)
                except distributed.RankMismatchError as error:
                    messages.append(str(error))
            return messages

        assert all(len(messages) == 2 and "the same model" in messages[0] for messages in run_ranks(train))

    def test_parameters(self):
        def average():
            rank = dist.get_rank()
            p, half = nn.Parameter(torch.full((2,), float(rank))), torch.full((1,), 60_000.0, dtype=torch.float16)
            same = distributed.all_reduce_parameter(p) is p
            return same, p.tolist(), p.requires_grad, distributed.all_reduce_parameter(half).item()

        assert run_ranks(average, size=4) == [(True, [1.5, 1.5], True, 60_000)] * 4

    @pytest.mark.wrong_types
    def test_what_has_no_mean(self):
        def average():
            with pytest.raises(DistributedError, match="has no mean"):
                distributed.all_reduce_parameter(torch.ones(2, dtype=torch.int64))
            sparse = nn.Embedding(3, 2, sparse=True)
            sparse(torch.tensor([0])).sum().backward()
            with pytest.raises(DistributedError, match="weight is sparse"):
                distributed.average_gradients(sparse)

        run_ranks(average)

    def test_without_a_process_group(self):
        own = model()
        distributed.average_gradients(own)
        p = nn.Parameter(torch.ones(1))
        assert distributed.all_reduce_parameter(p) is p


def test_every_rank_prints_what_it_has(tmp_path):
    def show():
        with (tmp_path / str(dist.get_rank())).open("w") as file:
            x = torch.tensor([1.0, NAN, 3.0])
            assert distributed.debug_distributed_rank(x, "logits", file) is x

    run_ranks(show)
    lines = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert lines == [
        f"rank {rank} of 2: logits: shape=(3,), dtype=torch.float32, device=cpu, 1 to 3, 1 NaN, 0 Inf\n"
        for rank in range(2)
    ]
