"""The algebraic layer: graphs against each other in exact arithmetic, at random points of a prime field."""

from torchguard.compiled.certify.algebra._check import check_derivatives, equivalent
from torchguard.compiled.certify.algebra._rules import ALGEBRAIC_OPS
from torchguard.exceptions import GraphMismatchError

__all__ = ["ALGEBRAIC_OPS", "GraphMismatchError", "check_derivatives", "equivalent"]
