"""Dynamo's guard trees: walked, checked, and extended by a guard of torchguard's; and the types and sources of guards.

The trees are C++ objects (`torch._C._dynamo.guards`) that no public API exposes; they are the same in torch 2.11 to
2.15. Walking and checking them is required by all of `torchguard.guards` but filters; `events.missing_for_guards` names
what torch lacks. What filters need has a degraded mode, which the docstrings at the end of this file name.
"""

import contextlib
import traceback
import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch

# Names that advice to the user quotes.
MARK_DYNAMIC, LIST_MODE_OPTIONS = "torch._dynamo.mark_dynamic", "torch._inductor.list_mode_options"
# The text that marks torchguard's own guard in Dynamo's trees.
_SHADOW_GUARD = "torchguard: the guards that were dropped"

Stack = Sequence[traceback.FrameSummary]


class Guards:
    """A guard tree, and the scope in which its sources are evaluated."""

    def __init__(self, root: Any, scope: dict[str, Any]) -> None:
        self.root, self._scope = root, scope

    @property
    def globals(self) -> dict[str, Any]:
        """The globals of the compiled function."""
        return self._scope["G"]

    def has_at_root(self, type: str) -> bool:
        """Whether one of the guards at the root, which have no source, is of that type."""
        return any(leaf.type == type for leaf in leaves_of(self.root))

    @property
    def is_audited(self) -> bool:
        """Whether torchguard's own guard is among them, which can fail a call when a dropped guard does not hold."""
        return any(_SHADOW_GUARD in one.verbose_code_parts() for one in self.root.get_epilogue_lambda_guards())

    def check(self, f_locals: dict[str, Any]) -> bool:
        """Whether a call with these locals satisfies all guards."""
        return self.root.check(f_locals)

    def key(self) -> "weakref.ref[Any]":
        """Identifies the tree, without keeping it alive: equal for all `Guards` of one cached entry."""
        return weakref.ref(self.root)

    def first_failing(self, f_locals: dict[str, Any]) -> str:
        """The text of the first guard that fails, as Dynamo reports it."""
        return "; ".join(self.root.check_verbose(f_locals).verbose_code_parts)

    def part(self, sources: Set[str]) -> "Guards":
        """The guards on these sources alone; the sources that lead to them must be among them."""
        return Guards(self.root.clone_manager(lambda manager: manager.get_source() in sources), self._scope)

    def part_on(self, sources: Set[str]) -> "Guards":
        """The guards on these sources and on those that lead to them."""
        needed: set[str] = set()

        def walk(manager: Any, above: tuple[str, ...]) -> None:
            path = (*above, manager.get_source())
            if path[-1] in sources:
                needed.update(path)
            for child in children_of(manager):
                walk(child, path)

        walk(self.root, ())
        return self.part(needed | {self.root.get_source()})

    def copy(self) -> "Guards":
        """The same guards in a tree of its own: Dynamo counts failures in its trees, and orders checks by them."""
        return Guards(self.root.clone_manager(lambda manager: True), self._scope)

    def sources(self) -> set[str]:
        """The sources that have a guard."""
        found: set[str] = set()

        def walk(manager: Any) -> None:
            if leaves_of(manager):
                found.add(manager.get_source())
            for child in children_of(manager):
                walk(child)

        walk(self.root)
        return found

    def value(self, source: str, f_locals: dict[str, Any]) -> Any:
        """The value of a source such as `L['self'].k` in a call with these locals. May raise anything."""
        from torch._dynamo.guards import _get_closure_vars

        if source == "L":
            return f_locals
        if source == "G":
            return self._scope["G"]
        return eval(source, {**_get_closure_vars(), **self._scope}, {"L": f_locals})

    def add_guard(self, hook: Callable[[dict[str, Any]], bool]) -> None:
        """Have Dynamo call `hook` with the locals of a call that satisfies all other guards; False fails the call."""
        self.root.add_epilogue_lambda_guard(hook, [_SHADOW_GUARD], None)


def guards_of(wrapper: Any) -> Guards:
    """The tree in Dynamo's wrapper; it has no guards if an object of a guard was deallocated."""
    scope = wrapper.global_scope or {"G": {}}
    return Guards(wrapper.root, {**(wrapper.closure_vars or {}), "G": scope["G"]})


def torch_function_enabled() -> contextlib.AbstractContextManager[Any]:
    """Switch `__torch_function__` on again: Dynamo switches it off while it checks guards, and one guard reads it."""
    return torch._C._EnableTorchFunction()  # pyright: ignore[reportAttributeAccessIssue]


class Leaf(NamedTuple):
    """One guard of a tree. `holds` checks a value; None if the guard can only be checked together with others."""

    source: str
    type: str
    code: tuple[str, ...]
    holds: Callable[[Any], bool] | None


def children_of(manager: Any) -> list[Any]:
    """The nodes below one node of a tree: of a dict, those of its keys and values."""
    from torch._C._dynamo.guards import DictGuardManager

    pairs = manager.get_key_value_managers().values() if isinstance(manager, DictGuardManager) else ()
    return [*(child for pair in pairs for child in pair if child), *manager.get_child_managers()]


def leaves_of(manager: Any) -> list[Leaf]:
    """The guards at one node of a tree, without torchguard's own; at the root, also those that run last."""
    from torch._C._dynamo.guards import RelationalGuard, RootGuardManager

    last = manager.get_epilogue_lambda_guards() if isinstance(manager, RootGuardManager) else []
    found = []
    for guard in [*manager.get_leaf_guards(), *last]:
        code = tuple(guard.verbose_code_parts())
        holds: Any = guard if callable(guard) and not isinstance(guard, RelationalGuard) else None
        if _SHADOW_GUARD not in code:
            found.append(Leaf(manager.get_source(), type(guard).__name__, code, holds))
    return found


# What filters need.


def guard_types() -> frozenset[str]:
    """The names of all guard types: the upper-case methods of Dynamo's `GuardBuilder`, which no public API lists.

    Degraded where torch has no `GuardBuilder`: empty, and filters do not check the names of types.
    """
    try:
        from torch._dynamo.guards import GuardBuilder  # here, because loading it takes seconds
    except ImportError:
        return frozenset()
    return frozenset(name for name in vars(GuardBuilder) if name.isupper())


def unserializable_guard_types() -> frozenset[str]:
    """The guard types that cannot be saved, which ahead-of-time compilation drops.

    Degraded where torch does not list them: empty, and `portable` filters keep those types.
    """
    try:
        from torch._dynamo.guards import CheckFunctionManager  # here, because loading it takes seconds
    except ImportError:
        return frozenset()
    return frozenset(getattr(CheckFunctionManager, "UNSUPPORTED_SERIALIZATION_GUARD_TYPES", ()))


def guard_sources(guard: Any) -> tuple[str, ...]:
    """Which kinds of source a guard is reached from: one or two of "global", "local", "module", "closure", "state".

    A guard has a source with a chain of bases; neither is public. Degraded where torch lacks them: "state".
    """
    chain = [getattr(guard, "originating_source", None)]
    while (base := getattr(chain[-1], "base", None)) is not None:
        chain.append(base)
    root, where, name = chain[-1], getattr(getattr(guard, "source", None), "name", ""), getattr(guard, "name", "")
    is_free = getattr(root, "is_derefed_cell_contents", False) and not getattr(root, "is_input", False)
    kinds = {
        "global": type(root).__name__ == "GlobalSource",
        "local": "LOCAL" in where and not is_free,
        "closure": is_free or ".__closure__" in name,
        "module": "MODULE" in where,
    }
    return tuple(kind for kind, applies in kinds.items() if applies and name) or ("state",)
