"""What torchguard raises. Each error is a `TorchGuardError` and the builtin a caller would guess."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchguard.device._report import DeviceReport
    from torchguard.device._violations import DeviceViolation


class TorchGuardError(Exception):
    """Root of everything torchguard raises."""


class NotFlagsError(TorchGuardError, TypeError):
    """A tensor was passed as flags that cannot be flags."""


class BatchMismatchError(TorchGuardError, ValueError):
    """Flags and tensor, or two flags tensors, hold different numbers of samples."""


class OutOfRangeError(TorchGuardError, ValueError):
    """A code, location, severity or slot does not fit its bits."""


class SampleIndexError(TorchGuardError, IndexError):
    """A sample was asked for that the flags do not hold."""


class ConfigError(TorchGuardError, ValueError):
    """An `ErrorConfig` was given a value it cannot have."""


class CorruptFlagsError(TorchGuardError, ValueError):
    """Flags hold a bit pattern no push can have written."""


class TracingError(TorchGuardError, RuntimeError):
    """A function that returns Python values was called while a graph was being traced."""


class BranchError(TorchGuardError, ValueError):
    """The branches of an `IF` chain do not fit together."""


class UnwrapError(TorchGuardError, RuntimeError):
    """A `Result` was unwrapped on the side it does not have."""


class AnnotationError(TorchGuardError, TypeError):
    """An annotation says something that cannot be, or that cannot be looked up."""


class CastError(TorchGuardError, ValueError):
    """Values would not come through a cast unchanged."""


class CastOverflowError(CastError, OverflowError):
    """Values lie outside of what the dtype can hold."""


class LossyCastError(CastError):
    """Values lie between those the dtype can hold."""


class ValidationError(TorchGuardError, ValueError):
    """Something passed to or returned from a function does not fit its annotation.

    Attributes:
        function: the function's name.
        parameter: where it was found: `x`, `batch.mask`, `return[0]`.
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


class WatchError(TorchGuardError, ValueError):
    """A model cannot be watched that way."""


class GuardError(TorchGuardError, ValueError):
    """Something about guards was asked for that cannot be done."""


class FilterError(GuardError, AssertionError):
    """A guard filter raised, or returned something other than one bool a guard, or names what torch does not know.

    Torch asserts the same of a filter; any other kind of error would come out of Dynamo as an internal one of its own.
    """


class StaleGuardError(TorchGuardError, AssertionError):
    """A guard that was dropped does not hold any more."""


class RecompileError(TorchGuardError, AssertionError):
    """Something was compiled in a place that was to do without."""


class ArtifactError(TorchGuardError, ValueError):
    """An artifact cannot be read, written or compared that way."""


class NoSuchArtifactError(ArtifactError, LookupError):
    """An artifact, or a file of one, was asked for that is not there."""


class DeviceError(TorchGuardError, ValueError):
    """A device is described in a way that cannot be, or something was asked of it that it cannot do."""


class DeviceRejectionError(TorchGuardError, RuntimeError):
    """A graph does not fit a device, and the mode is strict.

    Attributes:
        violations: everything that does not fit, of the forward and of the backward graph.
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
    """A function cannot be compiled as asked."""


class ImpureFunctionError(CompileError):
    """A function changes or reads what is not its own, or decides by values; the message names the line."""


class LeafTypeError(TorchGuardError, TypeError):
    """A leaf, tangent or seed has another shape, dtype, device or stride than was compiled for."""


class MissingRuleError(TorchGuardError, NotImplementedError):
    """An operation in the graph has no rule for the derivative that was asked for."""


class SavedGraphError(TorchGuardError, ValueError):
    """A file does not hold a graph that may be loaded, or a graph cannot be written to one."""


class GraphMismatchError(TorchGuardError, ValueError):
    """Two graphs cannot be compared: they take or return different things."""


class BoxError(TorchGuardError, ValueError):
    """The boxes to bound a graph over do not fit its leaves."""


class ValidationWarning(UserWarning):
    """Something could not be validated; an error under `ErrorConfig(strict_validation=True)`."""


class MixedRowsWarning(UserWarning):
    """A model has modules in which samples touch each other."""


class LocationWarning(UserWarning):
    """A place could not be given a name of its own."""


class GuardWarning(UserWarning):
    """A guard filter may not do what it says."""


class CompiledFunctionWarning(UserWarning):
    """A compiled derivative was wrong, and was made again in another way."""
