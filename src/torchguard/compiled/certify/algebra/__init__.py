"""Exact tests of graphs at random points of a prime field: derivatives against our own rules, graph against graph."""

from torchguard.compiled.certify.algebra._check import check_derivatives, equivalent
from torchguard.compiled.certify.algebra._rules import COVERED
from torchguard.exceptions import GraphMismatchError

__all__ = ["COVERED", "GraphMismatchError", "check_derivatives", "equivalent"]
