"""What is known in the course of one call: the sizes of names, the tensors seen, and what did not fit."""

from typing import TYPE_CHECKING, Any, NamedTuple

from torchguard.exceptions import (
    AnnotationError,
    DimensionMismatchError,
    InvalidParameterError,
    InvalidReturnTypeError,
    TypeMismatchError,
    ValidationError,
)

if TYPE_CHECKING:
    from torchguard.typing._spec import TensorSpec

# A tensor that was looked at: what it was declared as, where (`batch.mask`, `return[0]`), and its shape.
Seen = tuple["TensorSpec", str, tuple[int, ...]]


def described(value: Any) -> str:
    """What a value is, for a message."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


class Finding(NamedTuple):
    """Something that does not fit. Findings are told in the order of the arguments: by `turn`.

    `binds` is True for a tensor that fitted when it was met, so that names have their sizes from it, and no longer
    when all others were seen.
    """

    turn: int
    error: type[ValidationError]
    path: str
    annotation: str
    declared: str
    found: str
    advice: str | None = None
    seen: Seen | None = None
    binds: bool = False


class Scope:
    """One call. A name has one size in all of its arguments and in what it returns."""

    __slots__ = ("arguments", "findings", "function", "owner", "rests", "returning", "seen", "sizes")

    def __init__(self, function: str, owner: Any, arguments: dict[str, Any]) -> None:
        self.function, self.owner, self.arguments = function, owner, arguments
        self.returning = False
        self.sizes: dict[str, int] = {}
        self.rests: dict[str, tuple[tuple[int, ...], bool]] = {}
        self.seen: list[Seen] = []
        self.findings: list[Finding] = []

    def report(
        self, error: type[ValidationError], path: str, annotation: str, declared: str, found: str, advice: str | None
    ) -> None:
        # What is no tensor comes after the last one seen; a tensor is the last one seen.
        is_seen = bool(self.seen) and self.seen[-1][1] == path
        self.findings.append(Finding(len(self.seen) - is_seen, error, path, annotation, declared, found, advice))

    def report_kind(self, path: str, annotation: str, declared: str, found: str, advice: str) -> None:
        """Something other than a tensor, or a tensor of another kind."""
        error = TypeMismatchError if self.returning else InvalidParameterError
        self.report(error, path, annotation, declared, found, advice)

    def report_structure(self, path: str, declared: str, found: str) -> None:
        error = InvalidReturnTypeError if self.returning else InvalidParameterError
        self.report(error, path, "", declared, found, None)

    def report_shape(self, turn: int, binds: bool = False) -> None:
        spec, path, shape = seen = self.seen[turn]
        if not any(finding.seen is seen for finding in self.findings):
            found = str(tuple(shape))
            self.findings.append(Finding(turn, DimensionMismatchError, path, spec.text, "", found, None, seen, binds))

    def settle(self, start: int = 0) -> None:
        """Ask the dims that had to wait until every tensor was seen, from the `start`-th tensor on."""
        for turn in range(start, len(self.seen)):
            spec, path, shape = self.seen[turn]
            if not spec.is_late:
                continue
            try:
                if spec.fits_rank(shape) and spec.misfits(self.seen[turn], self.fork()):
                    self.report_shape(turn, binds=True)
            except AnnotationError as error:
                raise AnnotationError(f"{self.function}: {path}: {spec.text}: {error}") from error
        self.findings.sort(key=lambda finding: finding.turn)

    def fork(self) -> "Scope":
        """A scope to try something out in: it knows what is known here."""
        trial = Scope(self.function, self.owner, self.arguments)
        trial.returning, trial.sizes, trial.rests = self.returning, dict(self.sizes), dict(self.rests)
        trial.seen = list(self.seen)
        return trial

    def join(self, trial: "Scope") -> None:
        """Take over what was learnt in a scope forked off this one."""
        self.sizes, self.rests, self.seen = trial.sizes, trial.rests, trial.seen
        self.findings += trial.findings
