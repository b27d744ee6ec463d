"""Whose code is followed: the user's own, not that of torch, the standard library and installed packages."""

import functools
import sys
import sysconfig

_FOREIGN = ("torch", "numpy", "builtins", "torchguard", *sys.stdlib_module_names)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})


@functools.lru_cache(maxsize=4096)
def is_foreign(module: str) -> bool:
    """Whether a module is of torch, NumPy, torchguard or the standard library."""
    return module.split(".")[0] in _FOREIGN


@functools.lru_cache(maxsize=4096)
def is_own(module: str) -> bool:
    """Whether a module is the user's own: neither foreign nor an installed package."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not is_foreign(module) and not file.startswith(_INSTALLED)


def is_private(module: str) -> bool:
    return any(part.startswith("_") for part in module.split("."))


class Followed:
    """A base of torchguard's own classes whose objects are state of a closure: a `Retry` in another one's closure."""
