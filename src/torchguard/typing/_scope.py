"""The state of one validated call: sizes bound to names, tensors checked so far, and violations found."""

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

# A checked tensor: its declaration, its path (`batch.mask`, `return[0]`) and its shape.
CheckedTensor = tuple["TensorSpec", str, tuple[int, ...]]


def described(value: Any) -> str:
    """The type of a value, for a message."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


class Mismatch(NamedTuple):
    """One violation. Findings are reported in the order of the arguments, by `turn`.

    `binds` is True for a tensor that was accepted at first, and so bound names, but violates its annotation now that
    all tensors are known.
    """

    turn: int
    error: type[ValidationError]
    path: str
    annotation: str
    declared: str
    found: str
    advice: str | None = None
    checked: CheckedTensor | None = None
    binds: bool = False


class Scope:
    """One call: a name has one size in all arguments and in the returned value."""

    __slots__ = ("arguments", "checked", "findings", "function", "owner", "rests", "returning", "sizes")

    def __init__(self, function: str, owner: Any, arguments: dict[str, Any]) -> None:
        self.function, self.owner, self.arguments = function, owner, arguments
        self.returning = False
        self.sizes: dict[str, int] = {}
        self.rests: dict[str, tuple[tuple[int, ...], bool]] = {}
        self.checked: list[CheckedTensor] = []
        self.findings: list[Mismatch] = []

    def report(
        self, error: type[ValidationError], path: str, annotation: str, declared: str, found: str, advice: str | None
    ) -> None:
        # A tensor is the last one checked; anything else comes after it.
        is_seen = bool(self.checked) and self.checked[-1][1] == path
        self.findings.append(Mismatch(len(self.checked) - is_seen, error, path, annotation, declared, found, advice))

    def report_kind(self, path: str, annotation: str, declared: str, found: str, advice: str) -> None:
        """Report a value that is not a tensor, or a tensor of another kind."""
        error = TypeMismatchError if self.returning else InvalidParameterError
        self.report(error, path, annotation, declared, found, advice)

    def report_structure(self, path: str, declared: str, found: str) -> None:
        error = InvalidReturnTypeError if self.returning else InvalidParameterError
        self.report(error, path, "", declared, found, None)

    def report_shape(self, turn: int, binds: bool = False) -> None:
        spec, path, shape = checked = self.checked[turn]
        if not any(finding.checked is checked for finding in self.findings):
            found = str(tuple(shape))
            self.findings.append(
                Mismatch(turn, DimensionMismatchError, path, spec.text, "", found, None, checked, binds)
            )

    def check_deferred(self, start: int = 0) -> None:
        """Check the deferred dims, now that all tensors are known, from the `start`-th tensor on."""
        for turn in range(start, len(self.checked)):
            spec, path, shape = self.checked[turn]
            if not spec.is_deferred:
                continue
            try:
                if spec.has_rank_of(shape) and spec.mismatches(self.checked[turn], self.fork()):
                    self.report_shape(turn, binds=True)
            except AnnotationError as error:
                raise AnnotationError(f"{self.function}: {path}: {spec.text}: {error}") from error
        self.findings.sort(key=lambda finding: finding.turn)

    def fork(self) -> "Scope":
        """A copy of this scope, to try an option of a union in."""
        trial = Scope(self.function, self.owner, self.arguments)
        trial.returning, trial.sizes, trial.rests = self.returning, dict(self.sizes), dict(self.rests)
        trial.checked = list(self.checked)
        return trial

    def join(self, trial: "Scope") -> None:
        """Adopt the state of a fork of this scope."""
        self.sizes, self.rests, self.checked = trial.sizes, trial.rests, trial.checked
        self.findings += trial.findings
