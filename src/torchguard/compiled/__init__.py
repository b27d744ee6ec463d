"""Functions compiled once to a static graph, then evaluated, differentiated and certified."""

from torchguard._graphs.listing import Line
from torchguard.compiled._builder import Builder, Var
from torchguard.compiled._compile import compile_out, compile_scalar, state_of
from torchguard.compiled._derivatives import NonsmoothPoint
from torchguard.compiled._functions import CompiledOut, CompiledScalar
from torchguard.compiled._leaves import LeafType
from torchguard.compiled._load import load
from torchguard.compiled._session import Session
from torchguard.compiled.certify import Certificate, Claim, Verdict, Verification, equivalent
from torchguard.exceptions import (
    CompiledFunctionWarning,
    CompileError,
    ImpureFunctionError,
    LeafTypeError,
    MissingRuleError,
    SavedGraphError,
)

__all__ = [
    "Builder",
    "Certificate",
    "Claim",
    "CompileError",
    "CompiledFunctionWarning",
    "CompiledOut",
    "CompiledScalar",
    "ImpureFunctionError",
    "LeafType",
    "LeafTypeError",
    "Line",
    "MissingRuleError",
    "NonsmoothPoint",
    "SavedGraphError",
    "Session",
    "Var",
    "Verdict",
    "Verification",
    "compile_out",
    "compile_scalar",
    "equivalent",
    "load",
    "state_of",
]
