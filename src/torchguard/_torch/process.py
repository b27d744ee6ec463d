"""State that survives a second import or a reload of the package, and wrappers around functions of torch."""

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def of_this_process(name: str, make: Callable[[], T]) -> T:
    """What there is one of in a process, made when it is first asked for.

    Of this package there may be several copies: it can be dropped from `sys.modules` and imported again. So it is kept
    in torch, which cannot be imported twice.
    """
    kept = sys.modules["torch"].__dict__.setdefault("_torchguard", {})
    if name not in kept:
        kept[name] = make()
    return kept[name]


def kept_through_reloads(scope: dict[str, Any], name: str, make: Callable[[], T]) -> T:
    """What a module has in its `globals()` under a name; when it is reloaded, still the same.

    It is kept outside, since IPython empties a module before it reloads it, and by which dict that is: of a module of
    this package there may be several in a process.
    """
    modules = of_this_process("modules", dict)
    _, kept = modules.setdefault(id(scope), (scope, {}))  # the dict as well: another could come to lie there
    if name not in kept:
        kept[name] = make()
    return kept[name]


def replaced_by(scope: dict[str, Any], name: str, original: Any) -> Callable[..., Any]:
    """A function of torch's, replaced by ours of that name in a module's `globals()`, which is given `original` first.

    Ours is looked up in each call: when the module is reloaded, torch's function stays as it is, and calls the new one.
    """

    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return scope[name](original, *args, **kwargs)

    return replaced


def tell_copies_apart() -> None:
    """Have Dynamo look up the globals of a function of ours where they are, if this package was imported twice.

    It takes the module that has the name of a function's module, and remembers it: guards on what a function of another
    copy uses would look at this one's, and never fail. A scope without a module, as that of a namedtuple's methods, it
    knows by its identity; so one that belongs to another copy is called such while Dynamo asks. Where the method is
    missing, functions compiled with one copy do not notice that globals of theirs, such as `CONFIG`, have changed.
    """
    import torch._dynamo.symbolic_convert as dynamo  # not at import: it is heavy

    translator = getattr(dynamo, "InliningInstructionTranslator", None)
    find = getattr(translator, "get_globals_source_and_value", None)
    if translator is None or find is None or hasattr(find, "_torchguard_copies"):
        return
    import_module = getattr(dynamo, "_import_module", importlib.import_module)

    @functools.wraps(find)
    def found(self: Any, name: str) -> Any:
        scope = self.f_globals
        module = scope.get("__name__", "")
        if module.split(".")[0] != "torchguard" or vars(import_module(module)) is scope:
            return find(self, name)
        scope["__name__"] = f"namedtuple_{module}"
        try:
            return find(self, name)
        finally:
            scope["__name__"] = module

    found.__dict__["_torchguard_copies"] = True
    translator.get_globals_source_and_value = found
