"""The largest magnitude in each vector of a tensor: one number that tells "finite", "Inf" and "NaN" apart.

Inf is larger than all finite magnitudes, and NaN counts as larger than Inf. The CPU vectorises a maximum over
magnitudes. A GPU is faster with their bits, read as integers: without the sign bit they are ordered as the magnitudes
are, and the bits of NaN come after those of Inf. float16 is excluded: its bits would be int16 as well,
indistinguishable from bfloat16's.

In a graph for Inductor, this is one operator, `largest_magnitudes`, with a lowering of its own
(`_torch/inductor.py`). It saves what torch does for each operation of a graph: a model has hundreds of checks of five
to eleven operations. And it returns a list, which matters for inference: there Inductor moves a call that returns one
tensor to where that is used. All results of checks are used at the end of the graph, so the reductions would run there,
unfused, and read each tensor again. Other backends get the operations; a `split` that does nothing keeps their
reductions in place.
"""

import functools
import math
import struct
from pathlib import Path

import torch
from torch import Tensor

from torchguard._channel.detect import REVISION as REVISION_OF_CHANNEL
from torchguard._operators import define_opaque, source_checksum
from torchguard._torch.inductor import compile_largest_magnitudes
from torchguard._torch.tracing import in_transform, is_compiled_by_inductor, is_exporting, is_traced

# The integer dtype of the same size, and the bits of Inf in it.
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
_INF_BITS = {torch.int16: 0x7F80, torch.int32: 0x7F800000, torch.int64: 0x7FF0000000000000}
# A GPU holds a piece of this many numbers in registers, and need not read it again to replace it.
_LONGEST_PIECE, _SHORTEST_PIECE = 1_024, 256
# Of what the operators of this package trace into or are compiled to.
REVISION = source_checksum(Path(__file__).parent) ^ REVISION_OF_CHANNEL


def reads_bits(z: Tensor) -> bool:
    """Whether the magnitudes of a tensor are read as bits."""
    return not z.is_cpu and z.dtype in _BITS


def dtype_of_largest(z: Tensor) -> torch.dtype:
    """The dtype of what `largest_magnitudes` returns."""
    return _BITS[z.dtype] if reads_bits(z) else z.dtype


def inf_of(dtype: torch.dtype) -> float | int:
    """What stands for Inf in a dtype of `largest_magnitudes`."""
    return math.inf if dtype.is_floating_point else _INF_BITS[dtype]


def inf_bits(dtype: torch.dtype) -> int:
    """The bits of Inf in a dtype that is read as bits, or in that of its bits."""
    return _INF_BITS[_BITS.get(dtype, dtype)]


def bits_of(number: float, dtype: torch.dtype) -> int:
    """The bits of a positive number in a dtype that is read as bits."""
    if dtype == torch.float64:
        return struct.unpack("<q", struct.pack("<d", number))[0]
    bits = struct.unpack("<i", struct.pack("<f", number))[0]
    return bits if dtype == torch.float32 else bits >> 16


def num_pieces(width: int) -> int:
    """The number of equal pieces in which a GPU scans a vector."""
    if not isinstance(width, int) or width <= _LONGEST_PIECE:
        return 1
    fewest, most = -(-width // _LONGEST_PIECE), width // _SHORTEST_PIECE
    return next((pieces for pieces in range(fewest, most + 1) if width % pieces == 0), 1)


def largest_magnitudes(z: Tensor, pieces: int = 1, limit: float = math.inf) -> Tensor:
    """The largest magnitude in each vector of `z`, `(..., pieces)`. `z` is real, of 16 bits or more.

    Where bits are read, the result has no gradient. Elsewhere, `z` is detached.

    Args:
        pieces: into how many equal pieces to divide each vector.
        limit: magnitudes from here on count as Inf.
    """
    if _is_one_op(z):
        return _LARGEST_MAGNITUDES(z, pieces, *_limit_and_inf(z, limit), REVISION)[0]
    largest = _counted(_largest(_magnitudes(z), pieces), *_limit_and_inf(z, limit))
    return largest.split(pieces, -1)[0] if is_traced(z) else largest


def from_limit(largest: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    """Largest magnitudes, in which those from `limit` on count as Inf. `dtype` is that of the tensor itself."""
    inf = inf_of(largest.dtype)
    return _counted(largest, limit if largest.is_floating_point() else bits_of(limit, dtype), inf)


def _limit_and_inf(z: Tensor, limit: float) -> tuple[float | int, float | int]:
    inf = inf_of(dtype_of_largest(z))
    return (inf if limit == math.inf else bits_of(limit, z.dtype) if reads_bits(z) else limit), inf


def _is_one_op(z: Tensor) -> bool:
    if not is_traced(z) or is_exporting() or in_transform() or not is_compiled_by_inductor():
        return False
    return _compile_largest_magnitudes()


@functools.cache
def _compile_largest_magnitudes() -> bool:
    """Only when it is first needed, since this loads all of Inductor."""
    return compile_largest_magnitudes(_LARGEST_MAGNITUDES, _BITS)


def _magnitudes(z: Tensor) -> Tensor:
    return magnitude_bits(z) if reads_bits(z) else z.abs()


def magnitude_bits(z: Tensor) -> Tensor:
    """The bits of numbers without their sign."""
    return z.view(_BITS[z.dtype]) & torch.iinfo(_BITS[z.dtype]).max


def _largest(magnitudes: Tensor, pieces: int) -> Tensor:
    return magnitudes.unflatten(-1, (pieces, -1)).amax(-1) if pieces > 1 else magnitudes.amax(-1, keepdim=True)


def _counted(largest: Tensor, limit: float, inf: float) -> Tensor:
    """Magnitudes, or their bits, of which those from `limit` on are `inf` at least."""
    return largest if limit == inf else torch.where(largest >= limit, largest.clamp(min=inf), largest)


def _largest_magnitudes_op(z: Tensor, pieces: int, limit: float, inf: float, revision: int) -> list[Tensor]:
    return [_counted(_largest(_magnitudes(z), pieces), limit, inf).contiguous()]


_LARGEST_MAGNITUDES = define_opaque(
    "largest_magnitudes(Tensor z, int pieces, Scalar limit, Scalar inf, int revision) -> Tensor[]",
    _largest_magnitudes_op,
    lambda z, pieces, limit, inf, revision: [z.new_empty([*z.shape[:-1], pieces], dtype=dtype_of_largest(z))],
)
