"""`check_loss` and `check_exportable` accept what is right, and name what is wrong."""

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchguard import distributed
from torchguard.testing import ExportCheckError, LossCheckError, check_exportable, check_loss

F = nn.functional


def gathered_as_the_guide_does(predictions, targets):
    """Its `all_gather` drops the gradients of the other ranks, and those of its own."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        parts = [torch.empty_like(predictions) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, predictions.detach())
        parts[dist.get_rank()] = predictions
        predictions = torch.cat(parts)
        parts = [torch.empty_like(targets) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, targets)
        targets = torch.cat(parts)
    return F.l1_loss(predictions, targets)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class TestLosses:
    @pytest.mark.parametrize(
        "loss",
        [F.mse_loss, F.smooth_l1_loss, lambda p, t: F.mse_loss(p.float(), t.float())],
    )
    def test_good_ones(self, loss):
        assert len(check_loss(loss, distributed=False).cases) == 32

    def test_ranks(self):
        assert "two ranks" in check_loss(F.mse_loss, [torch.float32]).cases
        assert check_loss(distributed.calculate_loss_distributed, [torch.float32])

    @pytest.mark.parametrize(
        ("loss", "problem"),
        [
            (lambda p, t: (p - t).square().mean().sqrt(), "right: the gradient is not finite"),
            (lambda p, t: (p - t).abs(), "not one number"),
            (lambda p, t: (p - t).abs().mean().detach(), "was it detached"),
            (lambda p, t: (p / (t - t)).abs().mean(), "the loss is"),
            (lambda p, t: (p * 100).square().mean() + 0 * t.sum(), "float16, (4, 4), large values: the loss is inf"),
            (lambda p, t: (p - t.mul_(2)).abs().mean(), "changes its inputs in place"),
            (lambda p, t: WrongGradient.apply(p - t), "not the derivative"),
            (lambda p, t: p, "not one number"),
            (lambda p, t: 3.0, "returns float"),
        ],
    )
    def test_bad_ones(self, loss, problem):
        with pytest.raises(LossCheckError) as caught:
            check_loss(loss, distributed=False)
        assert problem in str(caught.value)

    @pytest.mark.parametrize(
        ("loss", "problem"),
        [
            (gathered_as_the_guide_does, "mean of the gradients"),
            (lambda p, t: (p - t).square().sum(), "mean of the losses"),
        ],
    )
    def test_bad_ones_on_two_ranks(self, loss, problem):
        with pytest.raises(LossCheckError) as caught:
            check_loss(loss, [torch.float64], [(2, 3)])
        assert f"two ranks: the {problem}" in str(caught.value)

    def test_inputs_of_the_user(self):
        def inputs(shape, dtype):
            return torch.randn(shape, dtype=dtype), torch.zeros(shape[0], dtype=torch.int64)

        assert check_loss(F.cross_entropy, [torch.float32], [(4, 3)], inputs=inputs)


class Pair(NamedTuple):
    x: Tensor
    mask: Tensor


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 3), nn.Dropout()

    def forward(self, pair: Pair) -> Pair:
        return Pair(self.dropout(self.layer(pair.x)) * pair.mask, pair.mask)


class TestExporting:
    def test_named_tuples_in_and_out(self):
        model = Masked().train()
        report = check_exportable(model, Pair(torch.ones(4, 3), torch.ones(4, 1)))
        assert report.batch_sizes == (4, 5, 2)
        assert model.training

    def test_arguments_by_position_and_by_name(self):
        model = nn.Bilinear(2, 3, 1)
        assert check_exportable(model, (torch.ones(3, 2), torch.ones(3, 3)))
        assert check_exportable(model, {"input1": torch.ones(3, 2), "input2": torch.ones(3, 3)})

    def test_a_branch_on_values(self):
        class Branch(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x if x.sum() > 0 else -x

        with pytest.raises(ExportCheckError, match="Branch cannot be exported"):
            check_exportable(Branch(), torch.ones(3, 2))

    def test_a_batch_size_that_is_written_into_the_model(self):
        class Fixed(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x.reshape(3, 2)

        with pytest.raises(ExportCheckError):
            check_exportable(Fixed(), torch.ones(3, 2))
        assert check_exportable(Fixed(), torch.ones(3, 2), dynamic_batch=False).batch_sizes == (3,)

    def test_values_that_are_written_into_the_program(self):
        """A value that the example decides, and another batch does not share."""

        class Constant(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x * len(x.tolist()) if not torch.compiler.is_compiling() else x * 4

        with pytest.raises(ExportCheckError):
            check_exportable(Constant(), torch.ones(4, 2))

    def test_an_example_without_a_batch(self):
        with pytest.raises(ExportCheckError, match="no tensor"):
            check_exportable(nn.Identity(), 3)


def test_the_fixture(two_ranks):
    assert two_ranks(lambda x: x + dist.get_rank(), 3) == [3, 4]
