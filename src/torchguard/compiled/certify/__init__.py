"""Certificates of compiled functions: what was checked of value and derivatives, by which layer, with what verdict.

`CompiledOut.certify(level)` runs the layers up to a level and returns a `Certificate`. A layer makes `Claim`s, and each
has a `Verdict`: pass, fail, or inconclusive, which shows nothing and names the reason. The layers, in order:

- **typed** (`check_types`): each node of the graph records the shape and dtype that follow from the leaves, by rules
  that do not ask torch. It rejects malformed graphs.
- **probe**: the compiled code satisfies identities at one point: its value is that of eager mode, its JVP is linear and
  follows the value, its VJP is the adjoint of the JVP. It tests the code that runs, up to rounding.
- **algebraic** (`check_derivatives`, `equivalent`): torch's derivative graphs are the derivatives, or two graphs
  compute one function, in exact arithmetic at random points of a prime field. It tests graphs, without a tolerance.
- **enclosure** (`enclose`): for all inputs in a `Box`, every computed value lies within bounds that include rounding
  errors.

All but the probe layer also work on any graph of ATen operators. `TYPED_OPS`, `ALGEBRAIC_OPS` and `ENCLOSURE_OPS` are
the operators for which a layer has rules.
"""

from torchguard.compiled.certify._certificate import Certificate, Claim, Verdict, Verification
from torchguard.compiled.certify.algebra import ALGEBRAIC_OPS, GraphMismatchError, check_derivatives, equivalent
from torchguard.compiled.certify.enclosure import ENCLOSURE_OPS, Box, BoxError, Enclosure, enclose
from torchguard.compiled.certify.types import TYPED_OPS, check_types

__all__ = [
    "ALGEBRAIC_OPS",
    "ENCLOSURE_OPS",
    "TYPED_OPS",
    "Box",
    "BoxError",
    "Certificate",
    "Claim",
    "Enclosure",
    "GraphMismatchError",
    "Verdict",
    "Verification",
    "check_derivatives",
    "check_types",
    "enclose",
    "equivalent",
]
