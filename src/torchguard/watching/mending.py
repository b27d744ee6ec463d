"""Mending in place: one pass that writes nothing where nothing is bad."""

import functools
from typing import Any

from torch import Tensor, nn
from torch.library import triton_op

from torchguard.operators import free_namespace
from torchguard.watching.blanking import only
from torchguard.watching.kinds import are_bits, is_fine, look, shape_of_evidence
from torchguard.watching.stopping import has_kernel

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
    from torchguard.watching.kernels import mend

    found = shape_of_evidence(z)
    mend(z, found)
    return found
