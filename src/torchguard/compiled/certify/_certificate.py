"""What was checked of a compiled function, layer by layer, as a record that can be kept and checked again."""

import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import torchguard
from torchguard.compiled._executables import precision
from torchguard.compiled._save import graph_hash
from torchguard.compiled.certify._claims import Claim, Verdict
from torchguard.compiled.certify._probe import probe_claims
from torchguard.exceptions import CompileError, MissingRuleError

if TYPE_CHECKING:
    from torchguard.compiled._functions import CompiledOut

LEVELS = ("typed", "probe", "algebraic", "enclosure")
_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.INCONCLUSIVE: "yellow"}


@dataclass(frozen=True)
class Certificate:
    """What was claimed of a compiled function, and on what ground. `ok` only says that nothing failed."""

    function: str
    level: str
    seed: int
    graph_hash: str
    point_hash: str
    leaves: tuple[str, ...]
    versions: tuple[tuple[str, str], ...]
    flags: tuple[tuple[str, str], ...]
    kinks: tuple[str, ...]
    claims: tuple[Claim, ...]

    @property
    def ok(self) -> bool:
        """Whether no claim failed. What is inconclusive did not."""
        return all(claim.verdict is not Verdict.FAIL for claim in self.claims)

    def of(self, verdict: Verdict | str) -> tuple[Claim, ...]:
        """The claims with a verdict: "pass", "fail" or "inconclusive"."""
        return tuple(claim for claim in self.claims if claim.verdict == Verdict(verdict))

    def to_json(self, indent: int | None = 2) -> str:
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
            "kinks": list(self.kinks),
            "claims": [claim.to_dict() for claim in self.claims],
        }
        return json.dumps(record, indent=indent)

    @staticmethod
    def from_json(text: str) -> "Certificate":
        """A certificate that was written down. Its claims are as good as where it was kept: `verify` checks it."""
        try:
            read = json.loads(text)
            claims = tuple(
                Claim(claim["layer"], claim["subject"], Verdict(claim["verdict"]), claim["says"], claim["details"])
                for claim in read["claims"]
            )
            return Certificate(
                str(read["function"]),
                str(read["level"]),
                int(read["seed"]),
                str(read["graph_hash"]),
                str(read["point_hash"]),
                tuple(map(str, read["leaves"])),
                tuple(sorted(read["versions"].items())),
                tuple(sorted(read["flags"].items())),
                tuple(map(str, read["kinks"])),
                claims,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CompileError(f"Certificate: this is not one: {type(error).__name__}: {error}") from error

    def verify(self, compiled: "CompiledOut", *, at: Any = None) -> "Verification":
        """Certify a function again, with the same seed and level, and say what is not as it was."""
        now = certify(compiled, self.level, at=at, seed=self.seed)
        return Verification(tuple(_changes(self, now)), now)

    def __str__(self) -> str:
        head = f"{self.function}: {'ok' if self.ok else 'FAILED'} up to {self.level}, graph {self.graph_hash[:12]}"
        return "\n".join([head, *(f"  {claim}" for claim in self.claims), *(f"  kink: {kink}" for kink in self.kinks)])

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=f"{self.function}: {'ok' if self.ok else 'FAILED'}", caption=f"graph {self.graph_hash[:12]}"
        )
        for heading in ("layer", "of", "verdict", "says"):
            table.add_column(heading)
        for claim in self.claims:
            verdict = Text(claim.verdict.value, style=_STYLES[claim.verdict])
            table.add_row(Text(claim.layer), Text(claim.subject), verdict, Text(claim.says))
        return table


@dataclass(frozen=True)
class Verification:
    """What is not as a certificate has it, and the certificate of today."""

    changed: tuple[str, ...]
    now: Certificate

    @property
    def ok(self) -> bool:
        return not self.changed and self.now.ok

    def __str__(self) -> str:
        return "\n".join(self.changed) if self.changed else f"{self.now.function}: as it was certified"


def certify(made: "CompiledOut", level: str, *, at: Any, seed: int) -> Certificate:
    """Check a compiled function up to a level."""
    if level not in LEVELS:
        raise CompileError(f"certify: level is one of {', '.join(LEVELS)}, not {level!r}.")
    point = point_of(made, at, seed)
    claims = [claim for layer in LEVELS[: LEVELS.index(level) + 1] for claim in _LAYERS[layer](made, point, seed)]
    versions = {"torch": torch.__version__, "python": platform.python_version(), "torchguard": torchguard.__version__}
    flags = {"backend": made.backend, "grad by": ",".join(leaf.name for leaf in made.leaves if leaf.differentiable)}
    flags |= {
        "matmul precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
    }
    devices = {str(leaf.device): leaf.device for leaf in made.leaves if leaf.device.type != "cpu"}
    flags |= {f"convolution precision on {name}": precision("convolution", device) for name, device in devices.items()}
    flags |= {f"healed {kind}": backend for kind, backend in made.fallbacks.items()}
    return Certificate(
        made.name,
        level,
        seed,
        graph_hash(made.graphs.forward),
        _point_hash(point),
        tuple(f"{leaf.name}: {leaf.in_full()}" for leaf in made.leaves),
        tuple(sorted(versions.items())),
        tuple(sorted(flags.items())),
        tuple(map(str, made.nonsmooth_points)),
        tuple(claims),
    )


def point_of(made: "CompiledOut", at: Any, seed: int) -> tuple[Tensor, ...]:
    """Where to check: what is given, the example, or random numbers."""
    from torchguard.compiled.certify._adjoint import random_like

    if at is not None:
        return made.point_at(at)
    if made.examples is not None:
        return made.examples
    drawn = random_like(made.leaves, seed)
    return tuple(
        d if leaf.dtype.is_floating_point else torch.zeros_like(d) for d, leaf in zip(drawn, made.leaves, strict=True)
    )


def _point_hash(point: Sequence[Tensor]) -> str:
    """What tells a point from every other one, by the bits of its numbers."""
    found = hashlib.sha256()
    for leaf in point:
        found.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
        found.update(leaf.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _typed(made: "CompiledOut", point: tuple[Tensor, ...], seed: int) -> Iterator[Claim]:
    from torchguard.compiled.certify.types import check_types

    yield check_types(made.graphs.forward, made.leaves)


def _algebraic(made: "CompiledOut", point: tuple[Tensor, ...], seed: int) -> Iterator[Claim]:
    from torchguard.compiled.certify.algebra import check_derivatives

    graphs: dict[str, Any] = {}
    for kind in ("jvp", "vjp"):
        try:
            graphs[kind] = made.graphs[kind]
        except (MissingRuleError, CompileError) as error:
            graphs[kind] = None
            yield Claim("algebraic", kind, Verdict.INCONCLUSIVE, f"There is none: {error}")
    differentiable = [leaf.differentiable for leaf in made.leaves]
    yield from check_derivatives(
        made.graphs.forward, graphs["jvp"], graphs["vjp"], differentiable=differentiable, seed=seed
    )


def _enclosed(made: "CompiledOut", point: tuple[Tensor, ...], seed: int) -> Iterator[Claim]:
    from torchguard.compiled.certify._bounds import enclosure_claims

    yield from enclosure_claims(made, point, seed)


_LAYERS: dict[str, Callable[["CompiledOut", tuple[Tensor, ...], int], Iterator[Claim]]] = {
    "typed": _typed,
    "probe": probe_claims,
    "algebraic": _algebraic,
    "enclosure": _enclosed,
}


def _changes(before: Certificate, now: Certificate) -> Iterator[str]:
    """What differs between two certificates, in words."""
    if before.graph_hash != now.graph_hash:
        yield f"the graph is another one: {before.graph_hash[:12]} was certified, and this is {now.graph_hash[:12]}"
    if before.point_hash != now.point_hash:
        yield "the point is another one: pass the one that was certified as at="
    yield from _differences(
        "leaf", [line.split(": ", 1) for line in before.leaves], [line.split(": ", 1) for line in now.leaves]
    )
    yield from _differences("version of", before.versions, now.versions)
    yield from _differences("flag", before.flags, now.flags)
    verdicts = [[(f"{c.layer} {c.subject} {n}", c.verdict.value) for n, c in _numbered(one)] for one in (before, now)]
    yield from _differences("claim", *verdicts)


def _numbered(certificate: Certificate) -> Iterator[tuple[int, Claim]]:
    seen: dict[tuple[str, str], int] = {}
    for claim in certificate.claims:
        key = (claim.layer, claim.subject)
        seen[key] = seen.get(key, 0) + 1
        yield seen[key], claim


def _differences(what: str, before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> Iterator[str]:
    old, new = ({key: value for key, value in pairs} for pairs in (before, now))  # noqa: C416 (pairs may be lists)
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) != new.get(key):
            yield f"{what} {key}: {old.get(key, 'none')} then, {new.get(key, 'none')} now"
