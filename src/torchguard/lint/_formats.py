"""Findings as text, JSON, SARIF, and GitHub annotations."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torchguard.lint._finding import UNREADABLE, Finding
from torchguard.lint._rules.base import Rule
from torchguard.lint._rules.registry import RULES


def as_github(findings: Iterable[Finding]) -> str:
    """Workflow commands, which GitHub shows beside the changed lines."""
    return "\n".join(
        f"::error title=torchguard ({_escaped(one.code)}),file={_escaped(one.file)},line={one.line},col={one.column}::"
        f"{one.file}:{one.line}:{one.column}: {one.code} {_data(one.message)}"
        for one in findings
    )


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def as_sarif(findings: Sequence[Finding], version: str) -> str:
    """SARIF 2.1.0, for code scanning."""
    used = sorted({finding.code for finding in findings})
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {"name": "torchguard", "version": version, "rules": [_sarif_rule(code) for code in used]}
                },
                "results": [_sarif_result(finding, used) for finding in findings],
            }
        ],
    }
    return json.dumps(log, indent=2)


def _sarif_rule(code: str) -> dict[str, Any]:
    rule = RULES.get(code)
    if rule is None:
        return {"id": code, "shortDescription": {"text": "A file cannot be checked."}}
    return {
        "id": code,
        "name": rule.name,
        "shortDescription": {"text": rule.summary},
        "fullDescription": {"text": " ".join(rule.why.split())},
    }


def _sarif_result(finding: Finding, used: list[str]) -> dict[str, Any]:
    uri = Path(finding.file).absolute().as_uri() if Path(finding.file).is_absolute() else Path(finding.file).as_posix()
    region = {"startLine": finding.line, "startColumn": finding.column}
    return {
        "ruleId": finding.code,
        "ruleIndex": used.index(finding.code),
        "level": "error" if finding.code == UNREADABLE or finding.code.startswith("TG1") else "warning",
        "message": {"text": finding.message},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}],
    }


def statistics(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """How often each rule was broken, most often first."""
    counts = Counter(finding.code for finding in findings)
    return [
        {"code": code, "name": RULES[code].name if code in RULES else "unreadable", "count": count}
        for code, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    ]


def page(rule: Rule) -> str:
    """The page of a rule, in Markdown."""
    state = "on by default" if rule.is_default else f"off by default; switch it on with `--select {rule.code}`"
    fix = " `--fix` rewrites what is safe to rewrite." if rule.is_fixable else ""
    return (
        f"# {rule.code}: {rule.name}\n\n{rule.summary}\n\nThis rule is {state}.{fix}\n\n"
        f"## Why\n{rule.why.strip()}\n\n"
        f"## Wrong\n```python\n{_cut(rule.wrong)}\n```\n\n"
        f"## Right\n```python\n{_cut(rule.right)}\n```\n\n"
        f"## When to silence it\n{rule.silence}\n\n"
        f"Write `# noqa: {rule.code}` at the end of the line, or see [configuration](../lint.md#configuration).\n"
    )


def _cut(code: str) -> str:
    lines = code.strip().splitlines()
    return "\n".join([*lines[:8], "    ...", *lines[-2:]] if len(lines) > 40 else lines)
