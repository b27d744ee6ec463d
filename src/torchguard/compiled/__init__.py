"""Functions compiled once to a static graph, then evaluated, pushed forward and pulled back; and certified."""

from torchguard.compiled.algebra import equivalent
from torchguard.compiled.builder import Builder, Var
from torchguard.compiled.certifying import Certificate, Verification
from torchguard.compiled.claims import Claim, Verdict
from torchguard.compiled.compiling import compile_out, compile_scalar, state_of
from torchguard.compiled.functions import CompiledOut, CompiledScalar
from torchguard.compiled.leaves import LeafType
from torchguard.compiled.listing import Kink, Line
from torchguard.compiled.loading import load
from torchguard.compiled.session import Session
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
    "Kink",
    "LeafType",
    "LeafTypeError",
    "Line",
    "MissingRuleError",
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
