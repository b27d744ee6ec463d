"""Mending in place: one pass that writes nothing where nothing is bad.

Zeros in the place of what is bad.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import triton_op

from torchguard._operators import are_kept_whole, define, define_whole, free_namespace
from torchguard._torch.tracing import is_shape_only, is_traced
from torchguard._watch.batch import Batch
from torchguard._watch.detect import REVISION, are_bits, is_fine, look, shape_of_evidence


def only(fine: Tensor, z: Tensor) -> Tensor:
    """`z` with zeros in the place of vectors that are not fine, or of pieces of them."""
    if fine.shape[-1] > 1:
        pieces = z.unflatten(-1, (fine.shape[-1], -1))
        return torch.where(fine.unsqueeze(-1), pieces, 0).to(z.dtype).flatten(-2)
    return _only(fine.squeeze(-1) if fine.ndim > z.ndim else fine, z)


def without_samples(origin: Tensor, z: Tensor, batch: Batch, dim: int | None) -> Tensor:
    """`z` with zeros in the place of samples that have an origin (-1: none); as it is if it has no samples."""
    if are_kept_whole():
        about = (batch.size, batch.lengths, batch.dim if dim is None else dim)
        return _WITHOUT_SAMPLES(origin, z, *about, REVISION)
    over = batch.over((origin < 0).to(z.device), z, dim)
    return z if over is None else _only(over, z)


def _only(fine: Tensor, z: Tensor) -> Tensor:
    """In eager mode it keeps its strides, by which kernels are chosen."""
    if z.is_floating_point() and z.element_size() == 1 and is_traced(z):
        return _only(fine, z.view(torch.uint8)).view(z.dtype)  # Inductor knows no `where` for these
    if z.ndim < 4 and (is_traced(z) or z.is_contiguous()):
        return torch.where(fine, z, 0).to(z.dtype)
    return z.clone().masked_fill_(~fine, 0)


class _Blank(torch.autograd.Function):
    """The same by a call that is not compiled: `where` would be two more kernels to compile."""

    @staticmethod
    def forward(z: Tensor, origin: Tensor, size: int, lengths: tuple[int, ...], along: int) -> Tensor:
        return _BLANK_SAMPLES(z, origin, size, lengths, along)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, origin, *ctx.about = inputs
        ctx.save_for_backward(origin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (origin,) = ctx.saved_tensors
        return _Blank.apply(grad, origin, *ctx.about), None, None, None, None  # pyright: ignore[reportReturnType]


def _without_samples_op(origin: Tensor, z: Tensor, size: int, lengths: list[int], along: int, revision: int) -> Tensor:
    batch = Batch(size, tuple(lengths), along, z.device)
    if not batch.has_rows(z.shape, along):
        return z.view_as(z)  # an operator may not return what it was given
    if is_traced(z) and z.is_cpu and not z.is_complex() and not is_shape_only(z):
        return _Blank.apply(z, origin, size, batch.lengths, along)  # pyright: ignore[reportReturnType]
    return _all_blanked(z, origin, batch)


def _blank_samples(z: Tensor, origin: Tensor, size: int, lengths: list[int], along: int) -> Tensor:
    if (origin < 0).all():
        return z.clone()
    return _all_blanked(z, origin, Batch(size, tuple(lengths), along, z.device))


def _all_blanked(z: Tensor, origin: Tensor, batch: Batch) -> Tensor:
    over = batch.over(origin.to(z.device) < 0, z)
    assert over is not None
    return _only(over, z)


def _alike(z: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(z)


_WITHOUT_SAMPLES = define(
    "without_samples(Tensor origin, Tensor z, SymInt size, SymInt[] lengths, int along, int revision) -> Tensor",
    _without_samples_op,
)
_BLANK_SAMPLES = define_whole(
    "blank_samples(Tensor z, Tensor origin, SymInt size, SymInt[] lengths, int along) -> Tensor", _blank_samples, _alike
)


def has_kernel(z: Tensor) -> bool:
    """Whether there is a kernel for a tensor, whose sizes are numbers."""
    return (
        z.is_cuda
        and z.is_contiguous()
        and z.numel() > 0
        and z.element_size() > 1
        and z.get_device() == torch.cuda.current_device()
        and _has_triton()
    )


@functools.cache
def _has_triton() -> bool:
    """Not every machine with a GPU has it."""
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return True


# The longest piece of a vector that a kernel holds in its registers.
_LONGEST = 4_096


def looks_like_qkv(module: nn.Module) -> bool:
    """Whether a module puts out queries, keys and values side by side, as far as its sizes tell: three times its input.

    Attention is a kernel with which none of Inductor's is fused, and it takes three slices: mended by a `where` as part
    of the graph, they are written twice over.
    """
    if isinstance(module, nn.Linear):
        return module.out_features == 3 * module.in_features
    given, put_out = getattr(module, "nx", None), getattr(module, "nf", None)  # the `Conv1D` of transformers
    return isinstance(given, int) and put_out == 3 * given


def can_be_mended(z: Tensor) -> bool:
    """Whether there is a kernel that mends a tensor, traced or not, in place."""
    if not all(isinstance(size, int) for size in z.shape) or not has_kernel(z) or not are_bits(z.dtype):
        return False
    return z.ndim in (2, 3) and z.shape[-1] <= _LONGEST * shape_of_evidence(z).shape[-1]


def mended(z: Tensor) -> tuple[Tensor, Tensor]:
    """`z` with zeros in the place of bad vectors, or pieces of them, and the evidence."""
    fine = z.clone()  # which Inductor leaves out where nobody else reads it
    return fine, _operator()(fine)


@functools.cache
def _operator() -> Any:
    """The operator `mend_`: Inductor sees what kernel that is, and calls it as it calls its own.

    It is made when it is first needed, since to make it loads all of Inductor.
    """
    return triton_op(f"{free_namespace('mend_')}::mend_", mend_, mutates_args={"z"})


def mend_(z: Tensor) -> Tensor:
    """Zeros in the place of bad vectors, or pieces of them. Returns the evidence."""
    if not can_be_mended(z):
        found = look(z)
        z.copy_(only(is_fine(found), z))
        return found
    from torchguard._watch.kernels import mend

    found = shape_of_evidence(z)
    mend(z, found)
    return found
