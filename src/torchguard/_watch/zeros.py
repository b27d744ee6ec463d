"""Zeros in place of values: of non-finite vectors, and of whole samples."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op

from torchguard._operators import define, define_opaque, free_namespace, use_operators
from torchguard._torch.inductor import compile_in_place
from torchguard._torch.tracing import is_shape_only, is_traced
from torchguard._watch.batch import MIXED, Batch
from torchguard._watch.detect import empty_status, is_finite, scan
from torchguard._watch.magnitudes import REVISION, reads_bits

# The longest piece of a vector that the kernel holds in registers.
_LONGEST_PIECE = 4_096


def zero_vectors(finite: Tensor, z: Tensor) -> Tensor:
    """`z` with zeros in vectors that are not finite; where `finite` has several entries a vector, in those pieces."""
    if finite.shape[-1] > 1:
        pieces = z.unflatten(-1, (finite.shape[-1], -1))
        return torch.where(finite.unsqueeze(-1), pieces, 0).to(z.dtype).flatten(-2)
    return _where(finite.squeeze(-1) if finite.ndim > z.ndim else finite, z)


def _where(keep: Tensor, z: Tensor) -> Tensor:
    """`torch.where(keep, z, 0)` with the strides of `z`, by which kernels are chosen; not so for varying sizes."""
    if z.is_floating_point() and z.element_size() == 1 and is_traced(z):
        return _where(keep, z.view(torch.uint8)).view(z.dtype)  # Inductor has no `where` for float8
    if not all(isinstance(size, int) for size in z.shape) or (z.ndim < 4 and z.is_contiguous()):
        return torch.where(keep, z, 0).to(z.dtype)
    if not is_traced(z):
        return z.clone().masked_fill_(~keep, 0)
    # In a graph, `where` orders dims as `keep` does, and `masked_fill` returns a contiguous tensor.
    zeroed = torch.where(keep, z, 0)
    return zeroed if zeroed.stride() == z.stride() else torch.empty_like(z).copy_(zeroed)


# Whole samples.


def zero_samples(origin: Tensor, z: Tensor, batch: Batch, rows: int | None) -> Tensor:
    """`z` with zeros in samples that have an origin (-1: none); unchanged if it is unbatched.

    If `z` mixes samples, all of it is zero as soon as one sample has an origin.
    """
    if use_operators():
        return _call_zero_samples(origin, z, batch, rows)
    keep = _kept(origin, z, batch, rows)
    return z if keep is None else _where(keep, z)


def _kept(origin: Tensor, z: Tensor, batch: Batch, rows: int | None) -> Tensor | None:
    is_good = (origin < 0).to(z.device)
    return is_good.all() if rows == MIXED else batch.broadcast(is_good, z, rows)


def _call_zero_samples(origin: Tensor, z: Tensor, batch: Batch, rows: int | None) -> Tensor:
    """Call the operator `zero_samples`."""
    return _ZERO_SAMPLES(origin, z, batch.size, batch.lengths, batch.dim, rows, REVISION)


def _zero_samples_op(
    origin: Tensor, z: Tensor, size: int, lengths: Sequence[int], along: int, rows: int | None, revision: int
) -> Tensor:
    batch = Batch(size, tuple(lengths), along, z.device)
    if rows != MIXED and not batch.has_samples(z.shape, rows):
        return z.view_as(z)  # an operator may not return its input
    if is_traced(z) and not z.is_complex() and not is_shape_only(z):
        return _ZeroSamples.apply(z, origin, batch, rows)  # pyright: ignore[reportReturnType]
    return _zeroed(z, origin, batch, rows)


_ZERO_SAMPLES = define(
    "zero_samples(Tensor origin, Tensor z, SymInt size, SymInt[] lengths, int along, int? rows, int revision) -> "
    "Tensor",
    _zero_samples_op,
)


class _ZeroSamples(torch.autograd.Function):
    """Zeros in bad samples, in a graph.

    On the CPU by an operator that is not compiled: as `where`, it would be two more kernels to compile. On a GPU by a
    kernel that writes to bad samples alone, in place if nothing uses the tensor later: `where` would be a second tensor
    beside the output of the model.
    """

    @staticmethod
    def forward(z: Tensor, origin: Tensor, batch: Batch, rows: int | None) -> Tensor:
        if z.is_cpu:
            return _call_zero_samples_eager(z, origin, batch, rows)
        if _can_zero_samples(z, batch, rows):
            _compile_zero_bad_samples()
            return _ZERO_BAD_SAMPLES(z, origin.to(z.device), batch.size, REVISION)
        return _zeroed(z, origin, batch, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, origin, ctx.batch, ctx.rows = inputs
        ctx.save_for_backward(origin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (origin,) = ctx.saved_tensors
        return _ZeroSamples.apply(grad, origin, ctx.batch, ctx.rows), None, None, None  # pyright: ignore[reportReturnType]


def _call_zero_samples_eager(z: Tensor, origin: Tensor, batch: Batch, rows: int | None) -> Tensor:
    """Call the operator `zero_samples_eager`."""
    return _ZERO_SAMPLES_EAGER(z, origin, batch.size, batch.lengths, batch.dim, rows)


def _zero_samples_eager_op(
    z: Tensor, origin: Tensor, size: int, lengths: Sequence[int], along: int, rows: int | None
) -> Tensor:
    if (origin < 0).all():
        return z.clone()
    return _zeroed(z, origin, Batch(size, tuple(lengths), along, z.device), rows)


_ZERO_SAMPLES_EAGER = define_opaque(
    "zero_samples_eager(Tensor z, Tensor origin, SymInt size, SymInt[] lengths, int along, int? rows) -> Tensor",
    _zero_samples_eager_op,
    lambda z, *_: torch.empty_like(z),
)


def _can_zero_samples(z: Tensor, batch: Batch, rows: int | None) -> bool:
    """Whether the kernel takes a tensor: its samples lie one behind another in memory."""
    is_static = all(isinstance(size, int) for size in (batch.size, *z.shape))
    return is_static and rows != MIXED and batch.is_sample_major(z.shape, rows) and has_kernel(z)


def _zero_bad_samples_in_place(z: Tensor, origin: Tensor, samples: int) -> None:
    from torchguard._watch.kernels import zero_bad_samples

    zero_bad_samples(z, origin, samples)


def _zero_bad_samples_op(z: Tensor, origin: Tensor, samples: int, revision: int) -> Tensor:
    zeroed = z.clone(memory_format=torch.contiguous_format)
    _zero_bad_samples_in_place(zeroed, origin, samples)
    return zeroed


_ZERO_BAD_SAMPLES_ = define_opaque(
    "zero_bad_samples_(Tensor(a!) z, Tensor origin, SymInt samples) -> ()", _zero_bad_samples_in_place, lambda *_: None
)
_ZERO_BAD_SAMPLES = define_opaque(
    "zero_bad_samples(Tensor z, Tensor origin, SymInt samples, int revision) -> Tensor",
    _zero_bad_samples_op,
    lambda z, *_: torch.empty_like(z, memory_format=torch.contiguous_format),
)


@functools.cache
def _compile_zero_bad_samples() -> None:
    """Have Inductor launch the kernel itself. Only when it is first needed, since this loads all of Inductor."""
    function = "torchguard._watch.kernels:zero_bad_samples"
    compile_in_place(_ZERO_BAD_SAMPLES, _ZERO_BAD_SAMPLES_, function, any_strides=True)


def _zeroed(z: Tensor, origin: Tensor, batch: Batch, rows: int | None) -> Tensor:
    keep = _kept(origin, z, batch, rows)
    assert keep is not None
    return _where(keep, z)


# In place, by a kernel that writes nothing where everything is finite.


def has_kernel(z: Tensor) -> bool:
    """Whether the kernels of `kernels.py` take a tensor, whose sizes are plain integers."""
    return (
        z.is_cuda
        and z.is_contiguous()
        and z.numel() > 0
        and z.element_size() > 1
        and z.get_device() == torch.cuda.current_device()
        and has_triton()
    )


@functools.cache
def has_triton() -> bool:
    """Not every machine with a GPU has it."""
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return True


def can_zero_in_place(z: Tensor) -> bool:
    """Whether there is a kernel that zeroes the non-finite vectors of a tensor, traced or not, in place."""
    if not all(isinstance(size, int) for size in z.shape) or not has_kernel(z) or not reads_bits(z):
        return False
    return z.ndim in (2, 3) and z.shape[-1] <= _LONGEST_PIECE * empty_status(z).shape[-1]


def zero_in_place(z: Tensor) -> tuple[Tensor, Tensor]:
    """`z` with zeros in non-finite vectors, or pieces of vectors, and its row status, by one pass over the memory."""
    finite = z.clone()  # Inductor leaves the copy out if nothing else reads `z`
    return finite, _zero_nonfinite_operator()(finite)


@functools.cache
def _zero_nonfinite_operator() -> Any:
    """The operator `zero_nonfinite_`. Inductor sees the Triton kernel in it, and calls that as it calls its own.

    The operator is made when it is first needed, since making it loads all of Inductor.
    """
    return triton_op(f"{free_namespace('zero_nonfinite_')}::zero_nonfinite_", zero_nonfinite_, mutates_args={"z"})


def zero_nonfinite_(z: Tensor) -> Tensor:
    """Write zeros into non-finite vectors, or pieces of vectors, of `z`. Returns the row status."""
    if not can_zero_in_place(z):
        status = scan(z)
        z.copy_(zero_vectors(is_finite(status), z))
        return status
    from torchguard._watch.kernels import zero_nonfinite

    status = empty_status(z)
    zero_nonfinite(z, status)
    return status
