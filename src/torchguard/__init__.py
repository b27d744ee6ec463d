"""torchguard makes a `torch.compile` region safe to run and easy to see into, without breaking its graph."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from torchguard import err, experimental, flags
from torchguard.checks import find, fix, flag_inf, flag_nan, flag_nan_and_inf, flag_oob_indices, has_err, push
from torchguard.control import AND, HAS, IF, IS, NOT, OR
from torchguard.errors import config as _config
from torchguard.errors.codes import ErrorCode, ErrorDomain, Severity
from torchguard.errors.config import (
    AccumulationConfig,
    Dedupe,
    ErrorConfig,
    Order,
    Priority,
    get_config,
    set_config,
)
from torchguard.errors.layout import (
    CODE_BITS,
    CODE_MASK,
    CODE_SHIFT,
    LOCATION_BITS,
    LOCATION_MASK,
    LOCATION_SHIFT,
    SEVERITY_BITS,
    SEVERITY_MASK,
    SEVERITY_SHIFT,
    SLOT_BITS,
    SLOT_MASK,
    SLOTS_PER_WORD,
)
from torchguard.exceptions import (
    AnnotationError,
    DeviceMismatchError,
    DimensionMismatchError,
    DTypeMismatchError,
    InvalidParameterError,
    InvalidReturnTypeError,
    TorchGuardError,
    TypeMismatchError,
    ValidationError,
)
from torchguard.flags import ErrorFlags, UnpackedError
from torchguard.locations import ErrorLocation, tracked
from torchguard.result import Err, Ok, Result, as_exception, as_result, unwrap
from torchguard.typing import tensorcheck
from torchguard.watching import unwatch, watch

if TYPE_CHECKING:
    from torchguard import artifacts, compiled, device, guards
    from torchguard.errors.config import CONFIG

__version__ = "2.0.0a1"

__all__ = [
    "AND",
    "CODE_BITS",
    "CODE_MASK",
    "CODE_SHIFT",
    "CONFIG",
    "HAS",
    "IF",
    "IS",
    "LOCATION_BITS",
    "LOCATION_MASK",
    "LOCATION_SHIFT",
    "NOT",
    "OR",
    "SEVERITY_BITS",
    "SEVERITY_MASK",
    "SEVERITY_SHIFT",
    "SLOTS_PER_WORD",
    "SLOT_BITS",
    "SLOT_MASK",
    "AccumulationConfig",
    "AnnotationError",
    "DTypeMismatchError",
    "Dedupe",
    "DeviceMismatchError",
    "DimensionMismatchError",
    "Err",
    "ErrorCode",
    "ErrorConfig",
    "ErrorDomain",
    "ErrorFlags",
    "ErrorLocation",
    "InvalidParameterError",
    "InvalidReturnTypeError",
    "Ok",
    "Order",
    "Priority",
    "Result",
    "Severity",
    "TorchGuardError",
    "TypeMismatchError",
    "UnpackedError",
    "ValidationError",
    "__version__",
    "artifacts",
    "as_exception",
    "as_result",
    "compiled",
    "device",
    "err",
    "experimental",
    "find",
    "fix",
    "flag_inf",
    "flag_nan",
    "flag_nan_and_inf",
    "flag_oob_indices",
    "flags",
    "get_config",
    "guards",
    "has_err",
    "push",
    "set_config",
    "tensorcheck",
    "tracked",
    "unwatch",
    "unwrap",
    "watch",
]


_LOADED_ON_USE = ("artifacts", "compiled", "device", "guards")


def __getattr__(name: str) -> Any:
    # Looked up each time, so that `tg.CONFIG` is what `set_config` last set.
    if name == "CONFIG":
        return _config.CONFIG
    if name in _LOADED_ON_USE:
        return importlib.import_module(f"torchguard.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if os.environ.get("TORCHGUARD_CAPTURE"):
    importlib.import_module("torchguard.artifacts")  # which starts to capture, if that is what it says
