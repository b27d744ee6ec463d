"""What torchguard raises. Each error is a `TorchGuardError` and the builtin a caller would guess."""


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


class LocationWarning(UserWarning):
    """A place could not be given a name of its own."""
