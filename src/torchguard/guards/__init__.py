"""Dynamo's guards: inspect them, measure them, drop some by a filter and audit those, explain recompiles."""

from torchguard.exceptions import FilterError, GuardError, GuardWarning, RecompileError, StaleGuardError
from torchguard.guards._audit import Audit, audit
from torchguard.guards._audit_report import AuditReport, GuardViolation
from torchguard.guards._certify import GuardCertificate, certify
from torchguard.guards._compile import compile, entries
from torchguard.guards._cost import Cost, cost
from torchguard.guards._filters import (
    Filter,
    aot_default,
    by_function,
    from_source,
    keep_all,
    keep_portable,
    keep_tensors,
    named,
    of_derived_type,
    of_type,
    precompile_default,
    skip_all,
    skip_globals,
    skip_inbuilt_nn_modules,
    skip_nn_modules,
    with_value,
)
from torchguard.guards._inspect import GuardInspector, Inspection, expect_no_recompile, inspect
from torchguard.guards._suggest import Suggestion, suggest
from torchguard.guards._why import Reason, Why, why

__all__ = [
    "Audit",
    "AuditReport",
    "Cost",
    "Filter",
    "FilterError",
    "GuardCertificate",
    "GuardError",
    "GuardInspector",
    "GuardViolation",
    "GuardWarning",
    "Inspection",
    "Reason",
    "RecompileError",
    "StaleGuardError",
    "Suggestion",
    "Why",
    "aot_default",
    "audit",
    "by_function",
    "certify",
    "compile",
    "cost",
    "entries",
    "expect_no_recompile",
    "from_source",
    "inspect",
    "keep_all",
    "keep_portable",
    "keep_tensors",
    "named",
    "of_derived_type",
    "of_type",
    "precompile_default",
    "skip_all",
    "skip_globals",
    "skip_inbuilt_nn_modules",
    "skip_nn_modules",
    "suggest",
    "why",
    "with_value",
]
