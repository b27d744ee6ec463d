"""Guarded and watched models in other runtimes: ONNX, `torch.export` programs, AOTInductor packages.

The flags leave the runtime as the last output, and the names of their locations travel in the file.
"""

from torchguard.exceptions import ExportError, MissingExtraError
from torchguard.export._file import flags_of, signature_of
from torchguard.export._onnx import to_onnx
from torchguard.export._program import to_package, to_program
from torchguard.export._signature import Signature

__all__ = [
    "ExportError",
    "MissingExtraError",
    "Signature",
    "flags_of",
    "signature_of",
    "to_onnx",
    "to_package",
    "to_program",
]
