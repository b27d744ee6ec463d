"""Certificates as data: claims about a compiled function, and a record of them that can be stored and checked again."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torchguard.exceptions import CompileError
from torchguard.report import Answer, Facts, Section, Shown, Status, Table

if TYPE_CHECKING:
    from torchguard.compiled._functions import CompiledOut

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Layer: TypeAlias = Literal["typed", "probe", "algebraic", "enclosure"]


class Verdict(StrEnum):
    """The result of a check. `INCONCLUSIVE` means that the check showed neither that it passes nor that it fails."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.INCONCLUSIVE: "yellow"}


_NUMBER = re.compile(r"[-+]?\d[\d.]*(?:e[-+]?\d+)?|\binf\b|\bnan\b")


@dataclass(frozen=True)
class Claim:
    """The result of one check of one graph: `message` is a sentence, `details` holds its numbers and names."""

    layer: Layer
    subject: str
    verdict: Verdict
    message: str
    details: Mapping[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "details", MappingProxyType(dict(self.details)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Claim, (self.layer, self.subject, self.verdict, self.message, dict(self.details))

    def to_dict(self) -> dict[str, Json]:
        """The claim as JSON holds it."""
        return {
            "layer": self.layer,
            "subject": self.subject,
            "verdict": self.verdict.value,
            "message": self.message,
            "details": dict(self.details),
        }

    def __str__(self) -> str:
        return f"{self.layer} {self.subject}: {self.verdict}. {self.message}"


@dataclass(frozen=True)
class Certificate(Shown):
    """The claims about a compiled function, and the graph, point, versions and settings they were checked with.

    `ok` says only that no claim failed: an inconclusive claim did not.
    """

    function: str
    level: str
    seed: int
    graph_hash: str
    point_hash: str
    leaves: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    flags: tuple[tuple[str, str], ...]
    nonsmooth_points: tuple[str, ...]
    claims: tuple[Claim, ...]

    @property
    def ok(self) -> bool:
        """Whether no claim failed."""
        return all(claim.verdict is not Verdict.FAIL for claim in self.claims)

    def of(self, verdict: Verdict | str) -> tuple[Claim, ...]:
        """The claims with a verdict: "pass", "fail" or "inconclusive"."""
        return tuple(claim for claim in self.claims if claim.verdict == Verdict(verdict))

    def to_json(self, indent: int | None = 2) -> str:
        """The certificate as JSON text, which `from_json` reads."""
        record = {
            "function": self.function,
            "ok": self.ok,
            "level": self.level,
            "seed": self.seed,
            "graph_hash": self.graph_hash,
            "point_hash": self.point_hash,
            "leaves": list(self.leaves),
            "versions": dict(self.versions),
            "flags": dict(self.flags),
            "nonsmooth_points": list(self.nonsmooth_points),
            "claims": [claim.to_dict() for claim in self.claims],
        }
        return json.dumps(record, indent=indent)

    @staticmethod
    def from_json(text: str) -> "Certificate":
        """Read a stored certificate. Nothing proves that its claims are genuine: `verify` checks them again.

        Raises:
            CompileError: the text is not a certificate.
        """
        try:
            record = json.loads(text)
            claims = tuple(
                Claim(claim["layer"], claim["subject"], Verdict(claim["verdict"]), claim["message"], claim["details"])
                for claim in record["claims"]
            )
            certificate = Certificate(
                str(record["function"]),
                str(record["level"]),
                int(record["seed"]),
                str(record["graph_hash"]),
                str(record["point_hash"]),
                tuple(map(str, record["leaves"])),
                tuple(sorted(record["versions"].items())),
                tuple(sorted(record["flags"].items())),
                tuple(map(str, record["nonsmooth_points"])),
                claims,
            )
            if record["ok"] != certificate.ok:
                raise ValueError("ok is not what its claims say")
            return certificate
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CompileError(
                f"Certificate: the text is not a certificate: {reason}. Pass what to_json returned."
            ) from error

    def verify(self, compiled: "CompiledOut", *, at: Any = None) -> "Verification":
        """Certify a function again, with the same seed and level, and list what differs from this certificate."""
        now = compiled.certify(self.level, at=at, seed=self.seed)
        return Verification(tuple(_changes(self, now)), now)

    def __str__(self) -> str:
        head = f"{self.function}: {'ok' if self.ok else 'FAILED'} up to {self.level}, graph {self.graph_hash[:12]}"
        nonsmooth = (f"  nonsmooth: {point}" for point in self.nonsmooth_points)
        return "\n".join([head, *(f"  {claim}" for claim in self.claims), *nonsmooth])

    def section(self) -> Section:
        """Whether a claim failed, and the claims by layer."""
        counts = {verdict: len(self.of(verdict)) for verdict in Verdict}
        status: Status = "bad" if counts[Verdict.FAIL] else "unknown" if counts[Verdict.INCONCLUSIVE] else "ok"
        text = ", ".join(f"{count} {verdict.value}" for verdict, count in counts.items() if count) or "no claims"
        facts = Facts((("Level", self.level), ("Graph", self.graph_hash[:12]), ("Seed", self.seed), *self.versions))
        columns = ("subject", "verdict", "message")
        layers = dict.fromkeys(claim.layer for claim in self.claims)
        tables = []
        for layer in layers:
            claims = (claim for claim in self.claims if claim.layer == layer)
            rows = tuple((claim.subject, claim.verdict.value, claim.message) for claim in claims)
            tables.append(Table(columns, rows, f"Claims of the layer {layer}"))
        if self.nonsmooth_points:
            rows = tuple((point,) for point in self.nonsmooth_points)
            tables.append(Table(("nonsmooth point",), rows, "Where a derivative is a convention"))
        return Section(f"Certificate of {self.function}", (Answer(status, f"{self.function}: {text}."), facts, *tables))

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=f"{self.function}: {'ok' if self.ok else 'FAILED'}", caption=f"graph {self.graph_hash[:12]}"
        )
        for heading in ("layer", "subject", "verdict", "message"):
            table.add_column(heading)
        for claim in self.claims:
            verdict = Text(claim.verdict.value, style=_STYLES[claim.verdict])
            table.add_row(Text(claim.layer), Text(claim.subject), verdict, Text(claim.message))
        return table


@dataclass(frozen=True)
class Verification:
    """The differences between a stored certificate and the one made now, and that one."""

    changed: tuple[str, ...]
    now: Certificate

    @property
    def ok(self) -> bool:
        """Whether nothing changed and no claim fails now."""
        return not self.changed and self.now.ok

    def __str__(self) -> str:
        return "\n".join(self.changed) if self.changed else f"{self.now.function}: unchanged since it was certified"


def _changes(before: Certificate, now: Certificate) -> Iterator[str]:
    """One sentence for each difference between two certificates."""
    if before.function != now.function:
        yield f"the function is called {now.function}, but {before.function} was certified"
    if before.graph_hash != now.graph_hash:
        yield f"the graph has changed: {before.graph_hash[:12]} was certified, this one is {now.graph_hash[:12]}"
    if before.point_hash != now.point_hash:
        yield "the point has changed: pass the point that was certified as at="
    leaves = ([line.split(": ", 1) for line in certificate.leaves] for certificate in (before, now))
    yield from _differences("leaf", *leaves)
    if len(before.leaves) != len(now.leaves):
        yield f"there are {len(now.leaves)} leaves, but {len(before.leaves)} were certified"
    yield from _differences("version of", before.versions, now.versions)
    yield from _differences("flag", before.flags, now.flags)
    points = ([(point, "present") for point in certificate.nonsmooth_points] for certificate in (before, now))
    yield from _differences("nonsmooth point", *points)
    if len(before.nonsmooth_points) != len(now.nonsmooth_points):
        yield f"there are {len(now.nonsmooth_points)} nonsmooth points, but {len(before.nonsmooth_points)} were listed"
    yield from _differences("claim", *map(_numbered_verdicts, (before, now)))
    for old, new in zip(before.claims, now.claims, strict=False):
        if old.verdict == new.verdict and _unmeasured(old) != _unmeasured(new):
            yield f"claim {new.layer} {new.subject} says {old.message!r} then, {new.message!r} now"


def _unmeasured(claim: Claim) -> tuple[str, list[tuple[str, Json]]]:
    """What a claim says without its measured numbers, which other machines round differently."""
    named = sorted((name, value) for name, value in claim.details.items() if not isinstance(value, float))
    return _NUMBER.sub("#", claim.message), [(name, value) for name, value in named if value not in ("inf", "nan")]


def _numbered_verdicts(certificate: Certificate) -> list[tuple[str, str]]:
    """The verdicts by layer, subject and a number: a layer may make several claims about one subject."""
    counts: dict[str, int] = {}
    verdicts = []
    for claim in certificate.claims:
        key = f"{claim.layer} {claim.subject}"
        counts[key] = counts.get(key, 0) + 1
        # The seed of a claim is that of its certificate, unless the file was changed.
        seed = claim.details.get("seed", certificate.seed)
        other = "" if seed == certificate.seed else f" with seed {seed}"
        verdicts.append((f"{key} {counts[key]}", f"{claim.verdict.value}{other}"))
    return verdicts


def _differences(what: str, before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> Iterator[str]:
    old, new = ({key: value for key, value in pairs} for pairs in (before, now))  # noqa: C416 (pairs may be lists)
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) != new.get(key):
            yield f"{what} {key}: {old.get(key, 'none')} then, {new.get(key, 'none')} now"
