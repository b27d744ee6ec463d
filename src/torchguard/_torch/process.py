"""State of the process that outlives a reload or a second import of this package, and patches of torch's functions.

A process can hold several copies of this package: it is dropped from `sys.modules` and imported again, or its modules
are reloaded one by one (IPython's `%autoreload` empties a module before it executes it again). torch cannot be imported
twice, and holds functions that were compiled with any of the copies. Two mechanisms follow from that:

- State that must exist once per process hangs on the `torch` module (`process_state`). State of one copy, which must
  survive a reload, hangs there too, under the identity of the module's `globals()` (`module_state`).
- A function of torch is patched once per copy. The patch looks its replacement up by name in each call, so that a
  reloaded module is used at once and never patches a second time (`patch_function`).

Only `separate_copies_in_dynamo` uses a private name, of torch 2.11 to 2.15, and says what is degraded without it.
"""

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def process_state(name: str, make: Callable[[], T]) -> T:
    """Return the object that all copies of this package share under `name`; `make` creates it on first use."""
    shared = sys.modules["torch"].__dict__.setdefault("_torchguard", {})
    if name not in shared:
        shared[name] = make()
    return shared[name]


def module_state(scope: dict[str, Any], name: str, make: Callable[[], T]) -> T:
    """Return the object that a module has under `name`, the same one before and after a reload.

    Args:
        scope: the module's `globals()`. Its identity is the key, since several copies of a module share a name.
    """
    modules = process_state("modules", dict)
    _, state = modules.setdefault(id(scope), (scope, {}))  # holding the dict keeps its id from being used again
    if name not in state:
        state[name] = make()
    return state[name]


def patch_function(owner: Any, name: str, scope: dict[str, Any], replacement: str) -> bool:
    """Replace a function of torch for good, once per module; returns whether torch has that function.

    Args:
        owner: the module or class that has the function.
        scope: the `globals()` of the module that patches.
        replacement: the name of a function there. It is called with the original function and the call's arguments.
    """
    patched: set[tuple[int, str]] = module_state(scope, "patched functions", set)
    if not hasattr(owner, name):
        return False
    original = getattr(owner, name)
    with process_state("patch lock", threading.Lock):
        if (id(owner), name) not in patched:

            @functools.wraps(original)
            def patch(*args: Any, **kwargs: Any) -> Any:
                return scope[replacement](original, *args, **kwargs)

            patched.add((id(owner), name))
            setattr(owner, name, patch)
    return True


def separate_copies_in_dynamo() -> None:
    """Have Dynamo resolve the globals of a torchguard function in the copy of the package that the function is from.

    Dynamo looks a function's module up by name in `sys.modules` and guards on what it finds there. With two copies
    of this package it finds the newer one, so guards on globals of the older one (`CONFIG`) would never fail. Dynamo
    treats a scope that belongs to no module (`namedtuple_...`) by identity instead, so the patch renames the older
    copy's scope to such a name while Dynamo asks. Called when the package is imported a second time. Degraded where
    torch lacks the method: functions compiled with the older copy do not recompile when its globals change.
    """
    import torch._dynamo.symbolic_convert as dynamo  # here, because loading it takes seconds

    translator = getattr(dynamo, "InliningInstructionTranslator", None)
    find = getattr(translator, "get_globals_source_and_value", None)
    if translator is None or find is None or hasattr(find, "_torchguard_copies"):
        return
    import_module = getattr(dynamo, "_import_module", importlib.import_module)

    @functools.wraps(find)
    def find_in_own_copy(self: Any, name: str) -> Any:
        scope = self.f_globals
        module = scope.get("__name__", "")
        if module.split(".")[0] != "torchguard" or vars(import_module(module)) is scope:
            return find(self, name)
        scope["__name__"] = f"namedtuple_{module}"
        try:
            return find(self, name)
        finally:
            scope["__name__"] = module

    find_in_own_copy.__dict__["_torchguard_copies"] = True
    translator.get_globals_source_and_value = find_in_own_copy
