"""Comparison of an exported model with the model: on other batch sizes, and with NaN and Inf in its inputs."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchguard import err
from torchguard._channel.packing import unpack
from torchguard._channel.validate import is_intact
from torchguard._pytrees import map_tensors, tensors_in
from torchguard._watch.export import unrecorded
from torchguard.exceptions import ExportError
from torchguard.export._example import Example, resized

Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]
# Outputs are compared loosely: kernels of two runtimes round differently. Flags are compared bit for bit.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def verify_outputs(example: Example, model: nn.Module, run: Run, batch: tuple[int, int | None], what: str) -> None:
    """Compare what a runtime returns with what the model does.

    Raises:
        ExportError: flags or outputs differ, or the last output is no flags tensor.
    """
    with torch.no_grad(), unrecorded(model):
        for case, args, kwargs in _cases(example, batch):
            want = [z for _, z in tensors_in(model(*args, **kwargs))]
            try:
                got = [z for _, z in tensors_in(run(args, kwargs))]
            except Exception as error:
                raise ExportError(f"export: {what} fails on {case}: {type(error).__name__}: {error}") from error
            _compare(case, got, want, what)


def _compare(case: str, got: list[Tensor], want: list[Tensor], what: str) -> None:
    if not is_intact(unpack(want[-1])).all():
        raise ExportError("export: the last output of the model has bits that no flags have. Return the flags last.")
    if not torch.equal(got[-1], want[-1].cpu()):
        rows = (got[-1] != want[-1].cpu()).any(-1).nonzero().flatten().tolist()
        raise ExportError(
            f"export: {what} gives other flags than the model on {case}, for samples {rows[:10]}: {what} computes "
            "other values there. verify=False exports it all the same."
        )
    good = err.is_ok(want[-1]).cpu()
    for number, (one, two) in enumerate(zip(got[:-1], want[:-1], strict=True)):
        one, two = one.cpu(), two.cpu()
        if two.ndim and len(two) == len(good):
            one, two = one[good], two[good]
        limit = _TOLERANCE.get(two.dtype, 0.0)
        if not torch.allclose(one.to(two.dtype), two, rtol=limit, atol=limit, equal_nan=True):
            raise ExportError(
                f"export: output {number} of {what} differs from the model's on {case} by more than {limit}. "
                "verify=False exports it all the same."
            )


def _cases(example: Example, batch: tuple[int, int | None]) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    low, high = batch
    sizes = {example.size: "the example"}
    if low != high:
        larger = 2 * example.size + 1
        sizes[max(low, 1)] = f"a batch of {max(low, 1)}"
        sizes[larger if high is None else min(larger, high)] = "a larger batch"
    for size, case in sizes.items():
        args, kwargs = resized(example, size)
        yield case, args, kwargs
        if any(z.is_floating_point() and example.has_samples(z) for z in example.tensors):
            yield f"{case} with NaN and Inf", *_with_faults(args, kwargs, size, example.dim)


def _with_faults(args: Any, kwargs: Any, size: int, dim: int) -> tuple[Any, Any]:
    """The arguments with a single NaN, Inf or -Inf in some samples of each floating-point tensor."""
    generator = torch.Generator().manual_seed(0)

    def plant(z: Tensor) -> Tensor:
        if not z.is_floating_point() or z.ndim <= dim or z.shape[dim] != size:
            return z
        z = z.clone()
        for sample in range(0, size, 2):
            row = z.select(dim, sample)
            at = [int(torch.randint(side, (), generator=generator)) for side in row.shape]
            row[tuple(at)] = (torch.nan, torch.inf, -torch.inf)[sample // 2 % 3]
        return z

    return map_tensors(args, plant), map_tensors(kwargs, plant)
