"""Guards on torchguard's own hooks: fewer than Dynamo makes.

Dynamo guards on all that it reads while it traces a call of a module with hooks: the hooks and their number, the code
of each, the object it is bound to and its attributes, and what `nn.Module._call_impl` looks up. These are 14 guards for
each watched module, with quarantine 25. They took longer to check than all guards of the unwatched model.

A hook of torchguard never changes. `watch` gives each module with such hooks an attribute `IDENTITY`, a string that
names the hooks and all their constants, and which `unwatch` takes away. Modules whose hooks do the same have the same
one, so that models that are alike share compiled code. A hook reads it in a graph, so that Dynamo guards on it. Where
that guard exists and the module has no other hooks, these guards are dropped:

- on its hooks and what they read, but not on their number, nor on what differs from model to model (`_OF_A_MODEL`);
- whether it, or its class, has a `_call_impl` of its own: of a module without hooks, Dynamo does not ask that either;
- whether the number of a hook is in a table of hooks of all modules: numbers are given once.

`build_guards` and the names of sources are the same in torch 2.11 to 2.15; degraded where they are others: all guards
stay. All this can be removed when a hook can tell Dynamo that it is constant.
"""

import re
from collections.abc import Callable
from typing import Any

from torch import nn

from torchguard._torch.process import patch_function

IDENTITY = "_torchguard_identity"
_OF_A_MODEL = ("watch", "address")  # attributes of a hook: the state of the watched model, and a number that names it
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_ALL_MODULES = ("._global_forward_hooks_with_kwargs", "._global_forward_hooks_always_called")
_OWN_CALL = ("__call__", "_call_impl", "_compiled_call_impl")
# The source of an attribute of a module's class: the source of the module, and the name of the attribute.
_OF_CLASS = re.compile(r"dict\(type\((.*)\)\.__mro__\[\d+\]\.__dict__\)\['(\w+)'\]")


def renew_identity(module: nn.Module) -> None:
    """Give a module whose hooks were changed a new identity; none if it has no hooks of torchguard's."""
    module.__dict__.pop(IDENTITY, None)
    if any(_never_changes(hook) for hook in _hooks_of(module)):
        module.__dict__[IDENTITY] = "; ".join(map(_described, filter(_never_changes, _hooks_of(module))))


def _hooks_of(module: nn.Module) -> list[Any]:
    return [hook for name in _HOOKS for hook in getattr(module, name).values()]


def _never_changes(hook: Any) -> bool:
    return getattr(type(getattr(hook, "__self__", None)), "is_constant_hook", False)


def _described(hook: Any) -> str:
    constants = {name: value for name, value in vars(hook.__self__).items() if name not in _OF_A_MODEL}
    return f"{hook.__func__.__qualname__} {constants}"


def skip_guards_on_hooks() -> bool:
    """Have Dynamo drop the guards that the identity of a module makes superfluous.

    Patches `CheckFunctionManager.build_guards`. Degraded where torch lacks it, or names sources otherwise: all guards
    stay, and a call takes longer.

    Returns:
        Whether torch has the function.
    """
    from torch._dynamo.guards import CheckFunctionManager  # here, because loading it takes seconds

    return patch_function(CheckFunctionManager, "build_guards", globals(), "_build_guards")


def _build_guards(original: Callable[..., Any], self: Any, sorted_guards: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces `CheckFunctionManager.build_guards`."""
    graph = next((one for one in (*args, *kwargs.values()) if hasattr(one, "local_scope")), None)
    if graph is not None:
        scope = {"L": graph.local_scope, "G": graph.global_scope}
        sorted_guards = _needed(sorted_guards, lambda source: eval(source, scope))
    return original(self, sorted_guards, *args, **kwargs)


def _needed(guards: list[Any], value: Callable[[str], Any]) -> list[Any]:
    """The guards without those that the identity of a module makes superfluous."""
    end = f".{IDENTITY}"
    sources = {guard.name.removesuffix(end) for guard in guards if guard.name.endswith(end)}
    modules = {source for source in sources if _has_no_other_hooks(source, value)}
    if not modules:
        return guards
    return [guard for guard in guards if not _is_superfluous(guard, modules)]


def _has_no_other_hooks(source: str, value: Callable[[str], Any]) -> bool:
    try:
        module = value(source)
    except Exception:  # a source that only Dynamo can read: its guards stay
        return False
    return isinstance(module, nn.Module) and all(map(_never_changes, _hooks_of(module)))


def _is_superfluous(guard: Any, modules: set[str]) -> bool:
    name: str = guard.name
    if name in modules:
        return _keywords(guard).get("attr") in _OWN_CALL
    if name.endswith(_OF_ALL_MODULES):
        return guard.create_fn_name() == "DICT_NOT_CONTAINS" or _keywords(guard).get("invert", False)
    if of_class := _OF_CLASS.fullmatch(name):
        return of_class[1] in modules and of_class[2] in _OWN_CALL
    module, _, _ = name.partition("._forward_hooks")
    module, _, _ = module.partition("._forward_pre_hooks")
    is_number = name.endswith(_HOOKS) and guard.create_fn_name() == "SEQUENCE_LENGTH"
    differs = ".__self__.watch." in name or name.endswith(".__self__.address")
    return module in modules and not is_number and not differs


def _keywords(guard: Any) -> dict[str, Any]:
    return getattr(guard.create_fn, "keywords", {})
