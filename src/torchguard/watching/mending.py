"""Mending in place: one pass that writes nothing where nothing is bad."""

import torch
from torch import Tensor, nn
from torch.library import custom_op, triton_op

from torchguard.watching.blanking import only
from torchguard.watching.kinds import are_bits, is_fine, look, shape_of_evidence
from torchguard.watching.stopping import has_kernel, has_triton

# The longest piece of a vector that a kernel holds in its registers.
_LONGEST = 4_096


def feeds_attention(module: nn.Module) -> bool:
    """Whether a module puts out queries, keys and values side by side, as its sizes tell.

    Attention is a kernel with which none of Inductor's is fused, and it takes three slices: mended by a `where` as part
    of the graph, they are written twice over.
    """
    if isinstance(module, nn.Linear):
        return module.out_features == 3 * module.in_features
    given, put_out = getattr(module, "nx", None), getattr(module, "nf", None)  # the `Conv1D` of transformers
    return isinstance(given, int) and put_out == 3 * given


def mends_in_place(z: Tensor) -> bool:
    """Whether `mend_` is faster than a `where` for a tensor that is traced and that no other kernel reads."""
    return has_kernel(z) and are_bits(z.dtype) and z.ndim in (2, 3) and z.shape[-1] <= _LONGEST * _pieces(z)


def mended(z: Tensor) -> tuple[Tensor, Tensor]:
    """`z` with zeros in the place of bad vectors, or pieces of them, and the evidence."""
    fine = z.clone()  # which Inductor leaves out where nobody else reads it
    return fine, torch.ops.torchguard.mend_(fine)


def _pieces(z: Tensor) -> int:
    return shape_of_evidence(z).shape[-1]


def _mend_(z: Tensor) -> Tensor:
    """Zeros in the place of bad vectors, or pieces of them. Returns the evidence."""
    if not mends_in_place(z) or not all(isinstance(size, int) for size in z.shape):
        found = look(z)
        z.copy_(only(is_fine(found), z))
        return found
    from torchguard.watching.kernels import mend

    found = shape_of_evidence(z)
    mend(z, found)
    return found


# Inductor sees what kernel that is, and calls it as it calls its own.
(triton_op if has_triton() else custom_op)("torchguard::mend_", _mend_, mutates_args={"z"})
