"""What an audit reports: violated guards, and how much was checked."""

from dataclasses import dataclass

from torchguard.report import Answer, Section, Shown, Table


@dataclass(frozen=True)
class GuardViolation:
    """A dropped guard that no longer holds: compiled code ran although an assumption of it had become false.

    Attributes:
        name: what the guard is about, such as `self.training`.
        type: of the guard, such as `EQUALS_MATCH`.
        function: the compiled function.
        compile_id: Dynamo's id of the compilation.
        line: your source line that led to the guard.
        then: the value when the function was compiled.
        now: the value when the audit checked it.
        calls: how many calls, this one included, may have returned stale results: those since the last clean check.
        checks: how many checks found this guard violated. The other attributes are those of the last one.
    """

    name: str
    type: str
    function: str
    compile_id: str
    line: str
    then: str
    now: str
    calls: int
    checks: int = 1

    def __str__(self) -> str:
        changed = f"{self.then} became {self.now}" if self.then and self.now else self.now or "no longer holds"
        where = f", from {self.line}" if self.line else ""
        found = f", found in {self.checks} checks" if self.checks > 1 else ""
        calls = f"calls affected: at most {self.calls}{found}{where}"
        return f"{self.type} {self.name} in {self.function}: {changed} ({calls})"


@dataclass(frozen=True)
class AuditReport(Shown):
    """What an audit found.

    Attributes:
        violations: one for each guard of a function, with the number of checks that found it.
        calls: of all functions compiled with the audit.
        checks: how many of these calls were checked.
        dropped: how many guards the filter dropped.
    """

    violations: tuple[GuardViolation, ...]
    calls: int
    checks: int
    dropped: int

    def section(self) -> Section:
        """How many dropped guards were violated, and each of them."""
        checked = f"{self.checks:,} of {self.calls:,} calls checked, {self.dropped:,} guards dropped."
        if self.violations:
            answer = Answer("bad", f"{len(self.violations)} dropped guards no longer held; {checked}")
        else:
            answer = Answer("ok" if self.checks else "unknown", f"No violation found; {checked}")
        columns = ("guard", "type", "function", "then", "now", "calls affected, at most", "checks", "from")
        rows = tuple(
            (one.name, one.type, one.function, one.then, one.now, one.calls, one.checks, one.line)
            for one in self.violations
        )
        return Section("Audit of dropped guards", (answer, *([Table(columns, rows)] if rows else [])))

    def __str__(self) -> str:
        head = f"{self.dropped} guards dropped, {self.checks} of {self.calls} calls checked, "
        return "\n".join([f"{head}{len(self.violations)} violations", *map(str, self.violations)])
