"""`all_gather` with gradients: what every rank computes from a gathered tensor flows back to the rank it came from."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from torchguard._pytrees import map_tensors
from torchguard._torch.tracing import is_plain
from torchguard.distributed._group import (
    Group,
    gathered,
    gathered_numbers,
    group_of,
    reduce_scatter_single,
    require_same,
)
from torchguard.exceptions import DistributedError

Value = TypeVar("Value")
_DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
_MAX_DIMS = 8


def all_gather(x: Value, group: Group = None) -> Value:
    """The rows of all ranks, rank 0's first: `(batch, ...)` becomes `(all, ...)`.

    Gradients of every rank are kept: that of a row is the sum of what all ranks compute from it. So a loss that is the
    same on all ranks has, averaged over the ranks as DDP does, the gradient of one process.

    In eager mode ranks may have different numbers of rows, and ranks whose tensors do not go together all raise
    `RankMismatchError`. In a graph, all have to have equally many. Every rank has to call `backward` if one does.

    Args:
        x: a tensor, or tensors in tuples, NamedTuples, lists, dicts or dataclasses. A 0-d tensor counts as one row.
        group: the ranks; all by default.

    >>> all_gather(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    ranks = group_of("all_gather", group)
    return map_tensors(x, lambda one: _gather(one, ranks))


def _gather(x: Shaped[Tensor, "..."], group: dist.ProcessGroup | None) -> Shaped[Tensor, "all *rest"]:
    rows = x.reshape(1) if x.ndim == 0 else x
    if group is None:
        return rows
    if x.dtype not in _DTYPES or x.ndim > _MAX_DIMS or x.layout is not torch.strided:
        raise DistributedError(f"all_gather: cannot send a {x.layout} tensor of {x.dtype} with {x.ndim} dims.")
    sizes = [rows.shape[0]] * dist.get_world_size(group)
    needs_grad = torch.is_grad_enabled() and rows.requires_grad
    if is_plain(x):
        sizes, needs_grad = _compared(rows, needs_grad, group)
    if not needs_grad:
        return _rows_of_ranks(rows, sizes, group)
    if not rows.requires_grad:  # its part of the backward pass is a collective: no rank may leave it out
        rows = rows.detach().requires_grad_()
    return _Gather.apply(rows, sizes, group)


def _compared(x: Tensor, needs_grad: bool, group: dist.ProcessGroup) -> tuple[list[int], bool]:
    """The number of rows of each rank, and whether any of them needs a gradient."""
    rest = [*x.shape[1:], *[-1] * (_MAX_DIMS - x.ndim)]
    found = gathered_numbers([x.shape[0], int(needs_grad), _DTYPES.index(x.dtype), *rest], x.device, group)
    require_same("all_gather", "dtype", [_DTYPES[one[2]] for one in found], "Convert to one dtype.")
    shapes = [f"(rows, {', '.join(str(size) for size in one[3:] if size >= 0)})" for one in found]
    require_same("all_gather", "the shape of a row", shapes, "Only dim 0 may differ.")
    return [one[0] for one in found], any(one[1] for one in found)


def _rows_of_ranks(x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    width = max(sizes)
    found = gathered(_as_bytes(_padded(x, width)), group)
    if x.dtype == torch.bool:
        found = found.to(torch.bool)
    elif found.dtype != x.dtype:
        found = found.view(x.dtype)
    found = found.reshape(len(sizes), width, *x.shape[1:])
    if all(size == width for size in sizes):
        return found.flatten(0, 1)
    return torch.cat([part[:size] for part, size in zip(found.unbind(), sizes, strict=True)])


def _as_bytes(x: Tensor) -> Tensor:
    """The same bits in a dtype that every backend can send."""
    if x.dtype == torch.bool:
        return x.to(torch.uint8)
    return x.contiguous().view(torch.uint8) if x.dtype in (torch.int16,) or x.is_complex() else x


def _padded(x: Tensor, rows: int) -> Tensor:
    missing = rows - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _rows_of_ranks(x, sizes, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Scatter.apply(grads[0], ctx.sizes, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    """The sum over ranks of the rows that this rank has: what `_Gather` is backward, and the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        width = max(sizes)
        sent = torch.stack([_padded(part, width) for part in x.split(sizes)]).contiguous()
        is_complex = sent.is_complex()
        sent = torch.view_as_real(sent) if is_complex else sent
        found = sent.new_empty(sent.shape[1:])
        reduce_scatter_single(found, sent.flatten(0, 1), op=dist.ReduceOp.SUM, group=group)
        found = torch.view_as_complex(found) if is_complex else found
        return found[: sizes[dist.get_rank(group)]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Gather.apply(grads[0], ctx.sizes, ctx.group), None, None
