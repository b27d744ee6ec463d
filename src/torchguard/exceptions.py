"""Exceptions and warnings of torchguard. Each error is a `TorchGuardError` and the builtin a caller would guess."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchguard.device._report import DeviceReport
    from torchguard.device._violations import DeviceViolation


__all__ = [
    "AnnotationError",
    "ArtifactError",
    "BatchMismatchError",
    "BoxError",
    "BranchError",
    "CastError",
    "CastOverflowError",
    "CompileError",
    "CompileOnceWarning",
    "CompiledFunctionWarning",
    "ConfigError",
    "CorruptFlagsError",
    "DTypeMismatchError",
    "DeviceError",
    "DeviceMismatchError",
    "DeviceRejectionError",
    "DimensionMismatchError",
    "DistributedError",
    "ExportCheckError",
    "ExportError",
    "FilterError",
    "GivenTwiceError",
    "GraphMismatchError",
    "GuardError",
    "GuardWarning",
    "IdsGivenError",
    "ImpureFunctionError",
    "InvalidParameterError",
    "InvalidReturnTypeError",
    "LeafTypeError",
    "LintError",
    "LocationWarning",
    "LossCheckError",
    "LossyCastError",
    "MissingExtraError",
    "MissingRuleError",
    "MixedRowsWarning",
    "NoSuchArtifactError",
    "NonFiniteError",
    "NotFlagsError",
    "OutOfRangeError",
    "RankFailedError",
    "RankMismatchError",
    "RecompileError",
    "ReportError",
    "RetryError",
    "RetryWarning",
    "ReturnsError",
    "SampleIndexError",
    "SavedGraphError",
    "StaleGuardError",
    "TorchGuardError",
    "TracingError",
    "TypeMismatchError",
    "UntestedTorchWarning",
    "UnwrapError",
    "ValidationError",
    "ValidationWarning",
    "WatchError",
]


class TorchGuardError(Exception):
    """Root of everything torchguard raises."""


class NotFlagsError(TorchGuardError, TypeError):
    """A value was passed as flags that cannot be flags."""


class BatchMismatchError(TorchGuardError, ValueError):
    """Flags and a tensor, or two flags tensors, hold different numbers of samples."""


class OutOfRangeError(TorchGuardError, ValueError):
    """A code, location, severity or slot is outside of its bit field."""


class SampleIndexError(TorchGuardError, IndexError):
    """A sample index is outside of the batch that the flags hold."""


class ConfigError(TorchGuardError, ValueError):
    """A value is not valid for a setting of `ErrorConfig`."""


class CorruptFlagsError(TorchGuardError, ValueError):
    """Flags hold bits that no push can have written."""


class TracingError(TorchGuardError, RuntimeError):
    """A function that returns Python values was called while a graph was being traced."""


class BranchError(TorchGuardError, ValueError):
    """The branches of an `IF` chain return values of different structures or shapes."""


class UnwrapError(TorchGuardError, RuntimeError):
    """`unwrap` was called on an `Err`, or `unwrap_err` on an `Ok`."""


class AnnotationError(TorchGuardError, TypeError):
    """An annotation is contradictory, or names something that cannot be resolved."""


class CastError(TorchGuardError, ValueError):
    """A cast would change values."""


class CastOverflowError(CastError, OverflowError):
    """Values lie outside of the range of the dtype."""


class LossyCastError(CastError):
    """Values cannot be represented exactly in the dtype."""


class ValidationError(TorchGuardError, ValueError):
    """An argument or a returned value violates its annotation.

    Attributes:
        function: the name of the function.
        parameter: the value in question: `x`, `batch.mask`, `return[0]`.
    """

    def __init__(self, message: str, function: str | None = None, parameter: str | None = None) -> None:
        super().__init__(message, function, parameter)
        self.message, self.function, self.parameter = message, function, parameter

    def __str__(self) -> str:
        return self.message


class DimensionMismatchError(ValidationError):
    """A tensor has another shape than declared."""


class DTypeMismatchError(ValidationError, TypeError):
    """A tensor has another dtype than declared."""


class DeviceMismatchError(ValidationError):
    """A tensor is on another device than declared."""


class InvalidParameterError(ValidationError, TypeError):
    """An argument is no tensor, or not of the declared structure, or its `requires_grad` differs."""


class TypeMismatchError(ValidationError, TypeError):
    """A returned value is no tensor where one was declared, or its `requires_grad` differs."""


class InvalidReturnTypeError(ValidationError, TypeError):
    """What a function returned is not of the declared structure."""


class GivenTwiceError(TorchGuardError, TypeError):
    """An argument was given under both of its names."""


class IdsGivenError(TorchGuardError, RuntimeError):
    """A path was added to a tree whose ids are assigned already: they would become invalid."""


class WatchError(TorchGuardError, ValueError):
    """A model cannot be watched as requested."""


class ReturnsError(WatchError, AttributeError, TypeError):
    """What a watched model returned, `(out, f)`, was used as if it were the model's own output."""


class RetryError(TorchGuardError, RuntimeError):
    """A training step cannot be guarded as requested."""


class RetryWarning(UserWarning):
    """A guarded step may not be restored completely."""


class DistributedError(TorchGuardError, RuntimeError):
    """Something cannot be done on several ranks as requested."""


class RankMismatchError(DistributedError, ValueError):
    """The ranks of a group called a function with values that do not go together. Every rank raises it."""


class RankFailedError(DistributedError):
    """A rank died, raised an exception or did not take part, and this one waited for it.

    Attributes:
        ranks: the ranks that caused it, with what is known of each.
    """

    def __init__(self, message: str, ranks: dict[int, str]) -> None:
        super().__init__(message, ranks)
        self.ranks = ranks

    def __str__(self) -> str:
        return self.args[0]


class NonFiniteError(TorchGuardError, ValueError):
    """A tensor holds NaN or Inf."""


class LossCheckError(TorchGuardError, AssertionError):
    """A loss function is not as `testing.check_loss` wants it."""


class ExportCheckError(TorchGuardError, AssertionError):
    """A model cannot be exported, or the exported program computes something else."""


class GuardError(TorchGuardError, ValueError):
    """A request about guards cannot be fulfilled."""


class FilterError(GuardError, AssertionError):
    """A guard filter raised, returned something other than one bool per guard, or names an unknown guard type.

    It is an AssertionError because torch asserts the same of a filter: Dynamo would wrap any other exception as an
    internal error.
    """


class StaleGuardError(TorchGuardError, AssertionError):
    """A dropped guard no longer holds."""


class RecompileError(TorchGuardError, AssertionError):
    """A region that must not recompile did."""


class ArtifactError(TorchGuardError, ValueError):
    """An artifact cannot be read, written or compared."""


class NoSuchArtifactError(ArtifactError, LookupError):
    """An artifact, or a file of one, does not exist."""


class DeviceError(TorchGuardError, ValueError):
    """A device description is invalid, or a device cannot do what was requested."""


class DeviceRejectionError(TorchGuardError, RuntimeError):
    """A graph violates the rules of a device, and the mode is strict.

    Attributes:
        violations: all violations, of the forward and of the backward graph.
        report: the same with coverage, partitions and memory; None in an error that was pickled, as graphs cannot be.
        devices: the names of the devices.
    """

    def __init__(
        self,
        report: "DeviceReport | None",
        violations: "tuple[DeviceViolation, ...] | None" = None,
        devices: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(report)
        graphs = report.graphs if report is not None else ()
        self.report = report
        self.violations = report.violations if report is not None else violations or ()
        self.devices = devices or tuple(dict.fromkeys(graph.device.name for graph in graphs))

    def __reduce__(self) -> "tuple[type[DeviceRejectionError], tuple[object, ...]]":
        return type(self), (None, self.violations, self.devices)

    def __str__(self) -> str:
        count = "1 violation" if len(self.violations) == 1 else f"{len(self.violations)} violations"
        return "\n".join([f"{count} of device {', '.join(self.devices)}:", *map(str, self.violations)])


class CompileError(TorchGuardError, ValueError):
    """A function cannot be compiled as requested."""


class ImpureFunctionError(CompileError):
    """A function reads or changes outside state, or branches on values; the message names the line."""


class LeafTypeError(TorchGuardError, TypeError):
    """A leaf, tangent or cotangent has another shape, dtype, device or stride than the function was compiled for."""


class MissingRuleError(TorchGuardError, NotImplementedError):
    """An operation in the graph has no rule for the requested derivative."""


class SavedGraphError(TorchGuardError, ValueError):
    """A file does not contain a loadable graph, or a graph cannot be saved."""


class GraphMismatchError(TorchGuardError, ValueError):
    """Two graphs cannot be compared: their inputs or outputs differ."""


class BoxError(TorchGuardError, ValueError):
    """The boxes to bound a graph over do not match its leaves."""


class ExportError(TorchGuardError, ValueError):
    """A model cannot be exported as requested, or a file is no export of torchguard's."""


class MissingExtraError(TorchGuardError, ImportError):
    """A library is not installed that an extra of torchguard installs; the message has the line that does."""


class UntestedTorchWarning(UserWarning):
    """The installed torch is newer than what torchguard was tested on, or lacks a private name that a part uses."""


class ValidationWarning(UserWarning):
    """Something could not be validated; an error under `ErrorConfig(strict_validation=True)`."""


class MixedRowsWarning(UserWarning):
    """A model has modules that mix samples of a batch."""


class CompileOnceWarning(UserWarning):
    """Blocks that were to be compiled once are compiled one by one."""


class LintError(TorchGuardError, ValueError):
    """The linter cannot do what was asked: a path, a code or a setting is wrong."""


class ReportError(TorchGuardError, ValueError):
    """A report cannot be read or written: the file, its schema or its suffix is wrong."""


class LocationWarning(UserWarning):
    """A location could not be given an id or name of its own."""


class GuardWarning(UserWarning):
    """A guard filter may have another effect than its name suggests, or code after a graph break is not compiled."""


class CompiledFunctionWarning(UserWarning):
    """A compiled derivative was wrong, and was compiled again in another way."""
