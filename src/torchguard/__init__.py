"""torchguard makes a `torch.compile` region safe to run and easy to see into, without breaking its graph.

Importing this package does not import torch: the command `torchguard run` is imported before the script that it runs,
and the script may have to set variables before it imports torch. If torch is imported already, the names that need
nothing but torch are loaded at once.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchguard import (
        artifacts,
        compiled,
        device,
        distributed,
        err,
        experimental,
        export,
        flags,
        guards,
        integrations,
        lint,
        report,
        testing,
        training,
        typing,
    )
    from torchguard._channel.codes import ErrorCode, ErrorDomain, Severity
    from torchguard._channel.config import (
        CONFIG,
        AccumulationConfig,
        Dedupe,
        ErrorConfig,
        Order,
        Priority,
        get_config,
        set_config,
    )
    from torchguard._channel.slot_bits import (
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
    from torchguard._retry import Retry, RetryReport, TensorHealth, check_grads, check_params, is_retrying
    from torchguard._watch import Incident, unwatch, watch
    from torchguard.checks import find, fix, flag_inf, flag_nan, flag_nan_and_inf, flag_oob_indices, has_err, push
    from torchguard.control import AND, HAS, IF, IS, NOT, OR
    from torchguard.exceptions import (
        AnnotationError,
        DeviceMismatchError,
        DimensionMismatchError,
        DTypeMismatchError,
        InvalidParameterError,
        InvalidReturnTypeError,
        RetryError,
        TorchGuardError,
        TypeMismatchError,
        ValidationError,
        WatchError,
    )
    from torchguard.flags import ErrorFlags, UnpackedError
    from torchguard.locations import ErrorLocation, tracked
    from torchguard.result import Err, Ok, Result, as_exception, as_result, unwrap
    from torchguard.typing import error_t, tensorcheck

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
    "Incident",
    "InvalidParameterError",
    "InvalidReturnTypeError",
    "Ok",
    "Order",
    "Priority",
    "Result",
    "Retry",
    "RetryError",
    "RetryReport",
    "Severity",
    "TensorHealth",
    "TorchGuardError",
    "TypeMismatchError",
    "UnpackedError",
    "ValidationError",
    "WatchError",
    "__version__",
    "artifacts",
    "as_exception",
    "as_result",
    "check_grads",
    "check_params",
    "compiled",
    "device",
    "distributed",
    "err",
    "error_t",
    "experimental",
    "export",
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
    "integrations",
    "is_retrying",
    "lint",
    "push",
    "report",
    "set_config",
    "tensorcheck",
    "testing",
    "tracked",
    "training",
    "typing",
    "unwatch",
    "unwrap",
    "watch",
]


_MODULES = (
    "artifacts",
    "compiled",
    "device",
    "distributed",
    "err",
    "experimental",
    "export",
    "flags",
    "guards",
    "integrations",
    "lint",
    "report",
    "testing",
    "training",
    "typing",
)
_HOMES = {
    "checks": "find fix flag_inf flag_nan flag_nan_and_inf flag_oob_indices has_err push",
    "control": "AND HAS IF IS NOT OR",
    "_channel.codes": "ErrorCode ErrorDomain Severity",
    "_channel.config": "AccumulationConfig Dedupe ErrorConfig Order Priority get_config set_config",
    "_channel.slot_bits": "CODE_BITS CODE_MASK CODE_SHIFT LOCATION_BITS LOCATION_MASK LOCATION_SHIFT SEVERITY_BITS "
    "SEVERITY_MASK SEVERITY_SHIFT SLOTS_PER_WORD SLOT_BITS SLOT_MASK",
    "exceptions": "AnnotationError DTypeMismatchError DeviceMismatchError DimensionMismatchError InvalidParameterError "
    "InvalidReturnTypeError RetryError TorchGuardError TypeMismatchError ValidationError WatchError",
    "flags": "ErrorFlags UnpackedError",
    "locations": "ErrorLocation tracked",
    "result": "Err Ok Result as_exception as_result unwrap",
    "typing": "error_t tensorcheck",
    "_retry": "Retry RetryReport TensorHealth check_grads check_params is_retrying",
    "_watch": "Incident unwatch watch",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "CONFIG":  # looked up each time, as `set_config` replaces it
        # By the `get_config` of this copy: a second import of the package has another in `sys.modules`.
        return (globals().get("get_config") or __getattr__("get_config"))()
    if name in _MODULES:
        return importlib.import_module(f"torchguard.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"torchguard.{_HOME_OF[name]}"), name)
    return found


if "torch" in sys.modules:  # Dynamo then finds the names as globals, and need not trace `__getattr__`
    for _name in ("err", "experimental", "flags", *_HOME_OF):
        if _HOME_OF.get(_name) != "_retry":  # which needs NumPy and torch.distributed
            __getattr__(_name)
if os.environ.get("TORCHGUARD_CAPTURE"):
    importlib.import_module("torchguard.artifacts")  # its import starts the capture
