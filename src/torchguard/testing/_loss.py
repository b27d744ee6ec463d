"""`check_loss`: values, gradients, edge cases and ranks of a loss function."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from torchguard.exceptions import LossCheckError
from torchguard.testing._processes import run_ranks

Loss = Callable[[Tensor, Tensor], Tensor]
Inputs = Callable[[tuple[int, ...], torch.dtype], tuple[Tensor, Tensor]]

# How far a loss may differ from the one in float64, relative to it.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


class LossReport(NamedTuple):
    """What `check_loss` checked: the names of all cases."""

    cases: tuple[str, ...]


def check_loss(
    fn: Loss,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
    shapes: Sequence[tuple[int, ...]] = ((4, 4), (1, 4)),
    *,
    inputs: Inputs | None = None,
    distributed: bool = True,
) -> LossReport:
    """Check a loss `fn(predictions, targets)`, and raise `LossCheckError` that lists all that is wrong.

    For each dtype and shape: it returns one finite number, close to that in float64; its gradient is finite, and is its
    derivative by finite differences; its inputs stay as they are. Edge cases: predictions that are right, zeros, large
    values. On two gloo ranks with half of the samples each: loss and gradient, averaged over the ranks, are those of
    all samples. A sum over samples is not: give `distributed=False`.

    Args:
        inputs: `inputs(shape, dtype)` makes predictions and targets; random ones by default. With it, edge cases are
            left out.
        distributed: whether to start two processes.

    >>> len(check_loss(torch.nn.functional.l1_loss, distributed=False).cases)
    32
    """
    make = _random if inputs is None else inputs
    cases, problems = [], []
    for name, predictions, targets in _cases(make, dtypes, shapes, with_edges=inputs is None):
        cases.append(name)
        problems += [f"{name}: {problem}" for problem in _problems(fn, predictions, targets)]
    for shape in shapes:
        cases.append(f"derivative, {shape}")
        problems += [
            f"derivative, {shape}: {problem}" for problem in _wrong_derivative(fn, *make(shape, torch.float64))
        ]
    if distributed:
        cases.append("two ranks")
        shape = next((one for one in shapes if one[0] > 1), (4, *shapes[0][1:]))
        joined = make((2 * shape[0], *shape[1:]), torch.float64)
        problems += [f"two ranks: {problem}" for problem in _problems_on_ranks(fn, *joined)]
    if problems:
        raise LossCheckError("\n".join([f"check_loss: {len(problems)} problems.", *problems]))
    return LossReport(tuple(cases))


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for _ in range(2))  # pyright: ignore[reportReturnType]


def _cases(
    make: Inputs, dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, ...]], with_edges: bool
) -> Iterator[tuple[str, Tensor, Tensor]]:
    for dtype in dtypes:
        for shape in shapes:
            predictions, targets = make(shape, dtype)
            yield f"{dtype}, {shape}", predictions, targets
            if with_edges:
                large = 100 if torch.finfo(dtype).max < 1e5 else 10_000
                yield f"{dtype}, {shape}, predictions that are right", targets.clone(), targets
                yield f"{dtype}, {shape}, zeros", torch.zeros_like(predictions), torch.zeros_like(targets)
                yield f"{dtype}, {shape}, large values", predictions * large, targets
                yield f"{dtype}, {shape}, constant", torch.ones_like(predictions), targets


def _problems(fn: Loss, predictions: Tensor, targets: Tensor) -> Iterator[str]:
    """What is wrong with the value, the gradient and the effects of a loss."""
    leaf = predictions.detach().clone().requires_grad_()
    kept = leaf.detach().clone(), targets.clone()
    loss = fn(leaf, targets)
    if problem := _wrong_value(loss):
        yield problem
        return
    wide = fn(predictions.detach().double(), targets.double() if targets.is_floating_point() else targets)
    tolerance = _TOLERANCES.get(predictions.dtype, 1e-4)
    if not torch.isclose(loss.detach().double(), wide.double(), rtol=tolerance, atol=tolerance):
        yield f"the loss is {loss.item():.6g}, and {wide.item():.6g} in float64. Compute it in float32 or float64"
    loss.backward()
    if leaf.grad is None:
        yield "predictions get no gradient"
    elif not leaf.grad.isfinite().all():
        yield f"the gradient is not finite: {int((~leaf.grad.isfinite()).sum())} of {leaf.grad.numel()} entries"
    if not (torch.equal(leaf.detach(), kept[0]) and torch.equal(targets, kept[1])):
        yield "it changes its inputs in place"


def _wrong_value(loss: Any) -> str:
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        return f"it returns {loss.dtype if isinstance(loss, Tensor) else type(loss).__name__}, no floating-point tensor"
    if loss.ndim:
        return f"it returns a tensor of shape {tuple(loss.shape)}, not one number"
    if not loss.isfinite():
        return f"the loss is {loss.item()}"
    return "" if loss.requires_grad else "the loss has no gradient: was it detached?"


def _wrong_derivative(fn: Loss, predictions: Float[Tensor, "..."], targets: Tensor) -> Iterator[str]:
    """Compare with differences over steps that a loss in float32 resolves, along some directions."""
    leaf = predictions.detach().clone().requires_grad_()
    loss = fn(leaf, targets)
    if _wrong_value(loss):
        return  # said already
    loss.backward()
    generator, step = torch.Generator().manual_seed(1), 1e-3
    for _ in range(3 if leaf.grad is not None else 0):
        direction = torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator)
        ahead, behind = (fn(predictions + sign * step * direction, targets).double() for sign in (1, -1))
        slope, want = (leaf.grad * direction).sum(), (ahead - behind) / (2 * step)  # pyright: ignore[reportOptionalOperand]
        if not torch.isclose(slope, want, rtol=1e-2, atol=1e-3):
            yield f"the gradient is not the derivative: a slope of {slope:.6g}, and {want:.6g} by finite differences"
            return


def _problems_on_ranks(fn: Loss, predictions: Tensor, targets: Tensor) -> list[str]:
    """A loss of one parameter on two ranks, each with half of the samples, against one process with all of them."""

    def loss_and_gradient(rows: slice) -> Tensor:
        parameter = torch.ones(predictions.shape[1:], dtype=predictions.dtype, requires_grad=True)
        loss = fn(parameter * predictions[rows], targets[rows])
        loss.backward()
        assert parameter.grad is not None
        return torch.cat([loss.detach().double().reshape(1), parameter.grad.flatten()])

    def on_rank() -> Tensor:
        half, rank = len(predictions) // 2, dist.get_rank()
        own = loss_and_gradient(slice(rank * half, (rank + 1) * half))
        dist.all_reduce(own)
        return own / 2

    want, found = loss_and_gradient(slice(None)), run_ranks(on_rank)[0]
    problems = []
    if not torch.isclose(found[0], want[0], rtol=1e-6, atol=1e-9):
        problems.append(f"the mean of the losses is {found[0]:.6g}, and {want[0]:.6g} for all samples in one process")
    if not torch.allclose(found[1:], want[1:], rtol=1e-6, atol=1e-9):
        problems.append(
            "the mean of the gradients is not that of all samples in one process. If it gathers samples, do so with "
            "torchguard.distributed.all_gather, which keeps the gradients of all ranks"
        )
    return problems
