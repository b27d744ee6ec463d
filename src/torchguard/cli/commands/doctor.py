"""`torchguard doctor`."""

from dataclasses import asdict

from torchguard.cli.examination import examine
from torchguard.cli.exits import ExitCode
from torchguard.cli.stored import AsJson
from torchguard.cli.terminal import console, emit_json, plain
from torchguard.cli.views import doctor as view

EXAMPLE = """
torchguard doctor

torchguard doctor --json | jq '.findings[] | select(.is_fine | not)'
"""


def doctor(as_json: AsJson = False) -> int:
    """See whether torch, its compilers and the hooks that torchguard uses are there and work."""
    findings = []
    for one in examine():
        findings.append(one)
        if not as_json:
            console().print(*view.finding(one), sep="\n")
    broken = [one.name for one in findings if one.is_broken]
    if as_json:
        emit_json({"is_fine": not broken, "findings": [asdict(one) for one in findings]})
    else:
        verdict = f"Broken: {', '.join(broken)}." if broken else "torchguard can work here."
        console().print(plain(verdict, "bold red" if broken else "bold green"))
    return ExitCode.FOUND if broken else ExitCode.FINE
