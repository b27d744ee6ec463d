"""Findings of the linter as a section of a report."""

from collections.abc import Sequence

from torchguard.lint._finding import Finding
from torchguard.lint._formats import statistics
from torchguard.report import Section, Table, Verdict

_MOST = 1_000  # findings in the table


def lint_section(findings: Sequence[Finding], files: int) -> Section:
    """The number of findings in a number of files, by rule, and each finding."""
    of = f"{files:,} file{'' if files == 1 else 's'}"
    if not findings:
        return Section("Lint", (Verdict("ok", f"No finding in {of}."),))
    count = f"{len(findings):,} finding{'' if len(findings) == 1 else 's'}"
    rules = tuple((one["code"], one["name"], one["count"]) for one in statistics(findings))
    rows = tuple((f"{one.file}:{one.line}:{one.column}", one.code, one.message) for one in findings[:_MOST])
    total = len(findings) if len(findings) > _MOST else None
    return Section(
        "Lint",
        (
            Verdict("warning", f"{count} in {of}."),
            Table(("rule", "name", "findings"), rules, "By rule"),
            Table(("where", "rule", "what to do"), rows, "Findings", total=total),
        ),
    )
