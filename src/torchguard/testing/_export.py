"""`check_exportable`: whether `torch.export` takes a model, and what it exports computes the same."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchguard._progress import progress_line
from torchguard._pytrees import map_tensors, tensors_in
from torchguard.exceptions import ExportCheckError


class ExportReport(NamedTuple):
    """An exported program, and the batch sizes for which it computes what the model does."""

    program: torch.export.ExportedProgram
    batch_sizes: tuple[int, ...]


def check_exportable(model: nn.Module, example: Any, *, dynamic_batch: bool = True) -> ExportReport:
    """Export a model in evaluation mode and compare with it; raise `ExportCheckError` if one of both fails.

    Args:
        example: what the model takes: a tensor or a NamedTuple, a tuple of arguments, or a dict of named arguments.
        dynamic_batch: have dim 0 vary in every tensor where it is that of the first, and compare for other sizes.

    >>> check_exportable(torch.nn.Linear(3, 2), torch.ones(4, 3)).batch_sizes
    (4, 5, 2)
    """
    args = example if type(example) is tuple else () if isinstance(example, dict) else (example,)
    kwargs = example if isinstance(example, dict) else {}
    tensors = [tensor for _, tensor in tensors_in((args, kwargs)) if tensor.ndim]
    if not tensors:
        raise ExportCheckError("check_exportable: the example has no tensor with a batch dimension.")
    batch = tensors[0].shape[0]
    shapes = torch.export.ShapesCollection()
    for tensor in tensors:
        if dynamic_batch and tensor.shape[0] == batch:
            shapes[tensor] = {0: torch.export.Dim.DYNAMIC}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), progress_line() as show:
            show(f"check_exportable: exporting {type(model).__name__}")
            program = _exported(model, args, kwargs, shapes if dynamic_batch else None)
            sizes = [*dict.fromkeys((batch, batch + 1, 2))] if dynamic_batch else [batch]
            for size in sizes:
                show(f"check_exportable: comparing for a batch of {size}")
                _compare(model, program, _resized((args, kwargs), batch, size), size)
    finally:
        for module, mode in modes:
            module.training = mode
    return ExportReport(program, tuple(sizes))


def _exported(model: nn.Module, args: Any, kwargs: Any, shapes: Any) -> torch.export.ExportedProgram:
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        raise ExportCheckError(
            f"check_exportable: {type(model).__name__} cannot be exported: {type(error).__name__}: {error}"
        ) from error


def _resized(value: Any, batch: int, size: int) -> Any:
    """A batch of another size, of the same samples."""

    def resize(x: Tensor) -> Tensor:
        if not x.ndim or x.shape[0] != batch or size == batch:
            return x
        return x.index_select(0, torch.arange(size, dtype=torch.int64, device=x.device) % batch)

    return map_tensors(value, resize)


def _compare(model: nn.Module, program: torch.export.ExportedProgram, inputs: Any, size: int) -> None:
    args, kwargs = inputs
    want = model(*args, **kwargs)
    try:
        found = program.module()(*args, **kwargs)
    except Exception as error:
        raise ExportCheckError(
            f"check_exportable: the exported program fails for a batch of {size}: {type(error).__name__}: {error}"
        ) from error
    wanted, got = (dict(tensors_in(one)) for one in (want, found))
    if type(want) is not type(found) or wanted.keys() != got.keys():
        raise ExportCheckError(
            f"check_exportable: the model returns {type(want).__name__} of {len(wanted)} tensors, and the exported "
            f"program {type(found).__name__} of {len(got)}."
        )
    for keys, tensor in wanted.items():
        try:
            torch.testing.assert_close(got[keys], tensor, equal_nan=True)
        except AssertionError as error:
            name = ".".join(map(str, keys)) or "the output"
            raise ExportCheckError(f"check_exportable: for a batch of {size}, {name} differs: {error}") from error
