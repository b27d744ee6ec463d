"""What a look at a tensor finds: for every vector along its last dim, the worst thing it holds."""

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from torchguard._channel.codes import ErrorCode
from torchguard._operators import are_kept_whole, define, revision_of
from torchguard._torch.tensors import mutation_count
from torchguard._torch.tracing import is_shape_only, is_surely, is_traced
from torchguard.checks import floats_of

# From fine to worst: where a vector holds several, the last one counts.
CODES = (ErrorCode.OK, ErrorCode.OUT_OF_BOUNDS, ErrorCode.NEGATIVE_IDX, ErrorCode.INF, ErrorCode.NAN)
FINE, OUT_OF_BOUNDS, NEGATIVE, INF, NAN = range(len(CODES))
# Whole numbers of the same size; and by these, the bits of Inf. Half is left out: of two bytes, there can be but one.
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
_LEAST = {torch.int16: 0x7F80, torch.int32: 0x7F800000, torch.int64: 0x7FF0000000000000}
# What is remembered on evidence: which tensor it is about.
_UNREAD = "_torchguard_unread"
# A GPU keeps so many numbers in its registers while it looks at them, and need not read them again to replace them.
_LONGEST, _SHORTEST = 1_024, 256
REVISION = revision_of(Path(__file__).parent)
# How a sample is marked: one NaN outweighs any number of Infs.
INF_MARK, NAN_MARK = 1.0, 2.0**20


def evidence(z: Tensor, alone: bool = False) -> Tensor:
    """One number for each vector of `z`, by a reduction that fuses with whatever else reads the vector.

    They have the shape of `z`, and as the last dim the pieces of a vector: one, on a GPU several of a long one.

    It is the largest magnitude, or its bits, of which NaN has the largest. The CPU vectorises the one, a GPU is faster
    with the other.

    Args:
        alone: whether nothing else reads the vectors in the same pass. Compiled for the CPU, such a look takes longer
            to compile than it ever saves: it is left to the one who reads the evidence, see `unread`.
    """
    return EVIDENCE(z, alone, REVISION) if are_kept_whole() else look(z)


def _evidence_op(z: Tensor, alone: bool, revision: int) -> Tensor:
    if is_shape_only(z):
        return shape_of_evidence(z)
    found = look(z)
    if alone and z.is_cpu and is_traced(z) and not z.is_inference():  # of these nobody counts the changes
        setattr(found, _UNREAD, (z.detach(), mutation_count(z)))
    return found


def unread(found: Tensor) -> Tensor | None:
    """The tensor that evidence is about, if that might as well be looked at now: the evidence is then left out."""
    z, changes = getattr(found, _UNREAD, (None, 0))
    return z if z is not None and mutation_count(z) == changes else None


def look(z: Tensor) -> Tensor:
    """The evidence, by operations that a backend sees."""
    ndim, is_complex = z.ndim, z.is_complex()
    z = floats_of(z) if z.is_cpu or z.dtype not in _BITS else z  # bits have no history
    if ndim == 0:
        z = z.reshape(-1)
    elif z.ndim == 1 or z.shape[-1] == 0:
        z = z.unsqueeze(-1)
    if z.is_cpu:
        return _largest(z.abs())
    pieces = _pieces(z.shape[-1]) if z.ndim in (2, 3) and not is_complex else 1
    return bits_of_largest(z.unflatten(-1, (pieces, -1))).squeeze(-1) if pieces > 1 else bits_of_largest(z)


def are_bits(dtype: torch.dtype) -> bool:
    """Whether evidence about such numbers on a GPU has their bits."""
    return dtype in _BITS


def bits_of_largest(z: Tensor) -> Tensor:
    """The bits of the largest magnitude in each vector, without the sign; of half, the magnitude."""
    bits = _BITS.get(z.dtype)
    return _largest(z.abs() if bits is None else z.view(bits) & torch.iinfo(bits).max)


def shape_of_evidence(z: Tensor) -> Tensor:
    """Something of the shape and dtype of the evidence, for one whose values nobody will see."""
    if z.ndim < 2 or z.is_complex() or z.element_size() == 1 or z.shape[-1] == 0:
        return look(z)
    pieces = 1 if z.is_cpu or z.ndim > 3 else _pieces(z.shape[-1])
    return z.new_empty([*z.shape[:-1], pieces], dtype=z.dtype if z.is_cpu else _BITS.get(z.dtype, z.dtype))


def _largest(z: Tensor) -> Tensor:
    largest = z.amax(-1, keepdim=True)
    # For inference, Inductor moves a call to where its result is used: `amax` would be far from what else reads `z`,
    # and not be fused with it. A call with several results stays where it is; this one does nothing.
    return largest.split(1, -1)[0] if is_traced(z) else largest


def _pieces(width: int) -> int:
    """In how many equal pieces to look at a vector."""
    if not isinstance(width, int) or width <= _LONGEST:
        return 1
    fewest, most = -(-width // _LONGEST), width // _SHORTEST
    return next((pieces for pieces in range(fewest, most + 1) if width % pieces == 0), 1)


EVIDENCE = define("evidence(Tensor z, bool alone, int revision) -> Tensor", _evidence_op)


def nothing_like(found: Tensor) -> Tensor:
    """Evidence that speaks against nothing, and is known to: there is none."""
    return found.new_empty(0)


def says_nothing(found: Tensor) -> bool:
    return found.ndim == 1 and is_surely(found.shape[0] == 0)


def index_evidence(ids: Tensor, size: int) -> Tensor:
    """The same for indices into a table of that size."""
    kinds = torch.where(ids < 0, NEGATIVE, torch.where(ids >= size, OUT_OF_BOUNDS, FINE)).to(torch.int8)
    return kinds.amax(-1, keepdim=True) if kinds.ndim > 1 else kinds.unsqueeze(-1)


def kinds_of(found: Tensor) -> Tensor:
    """The kind that each piece of evidence speaks of."""
    if found.dtype == torch.int8:
        return found
    return torch.where(is_nan(found), NAN, torch.where(is_fine(found), FINE, INF)).to(torch.int8)


def is_fine(found: Tensor) -> Tensor:
    """Whether evidence speaks not against numbers: one operation, since it is asked at every module."""
    return found < (math.inf if found.is_floating_point() else _LEAST[found.dtype])


def are_finite(z: Tensor) -> bool:
    """Whether all numbers are. By few calls, each of which takes long when it is rare; and it reads a value."""
    z = z.detach()
    if math.isfinite(z.sum().item()) or z.numel() == 0:
        return True
    low, high = z.aminmax()  # the sum of finite numbers may overflow
    return low.item() > -math.inf and high.item() < math.inf


def is_nan(found: Tensor) -> Tensor:
    return found != found if found.is_floating_point() else found > _LEAST[found.dtype]


def raised(found: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    """The evidence, of which what reaches a limit counts as Inf."""
    if found.is_floating_point():
        return torch.where(found >= limit, math.inf, found)
    return torch.where(found >= _bits_of(limit, dtype), torch.clamp(found, min=_LEAST[found.dtype]), found)


def _bits_of(number: float, dtype: torch.dtype) -> int:
    if dtype == torch.float64:
        return struct.unpack("<q", struct.pack("<d", number))[0]
    bits = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits if dtype == torch.float32 else bits >> 16


def narrowed(found: Tensor, kind: int) -> Tensor:
    """The evidence, as far as it speaks of one kind."""
    kinds = kinds_of(found)
    return torch.where(kinds == kind, kinds, FINE)
