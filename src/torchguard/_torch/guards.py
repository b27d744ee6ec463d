"""Guard trees of Dynamo: walked, checked, and listened to."""

import contextlib
import traceback
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch

# What advice names.
MARK_DYNAMIC, LIST_MODE_OPTIONS = "torch._dynamo.mark_dynamic", "torch._inductor.list_mode_options"
# The text by which a check of ours in Dynamo's trees is known.
OURS = "torchguard: the guards that were dropped"


Stack = Sequence[traceback.FrameSummary]


class Guards:
    """A tree of guards, and what is needed to call it."""

    def __init__(self, root: Any, scope: dict[str, Any]) -> None:
        self.root, self._scope = root, scope

    def has_at_root(self, type: str) -> bool:
        """Whether one of the guards on no source in particular is of that type."""
        return any(leaf.type == type for leaf in leaves_of(self.root))

    def check(self, f_locals: dict[str, Any]) -> bool:
        return self.root.check(f_locals)

    def first_failing(self, f_locals: dict[str, Any]) -> str:
        """What Dynamo itself would say: the text of the first guard that fails."""
        return "; ".join(self.root.check_verbose(f_locals).verbose_code_parts)

    def part(self, sources: Set[str]) -> "Guards":
        """The guards on these sources alone, which have to have the ways to them among them."""
        return Guards(self.root.clone_manager(lambda manager: manager.get_source() in sources), self._scope)

    def value(self, source: str, f_locals: dict[str, Any]) -> Any:
        """What a source such as `L['self'].k` stands for, in a call with these locals. May raise anything."""
        from torch._dynamo.guards import _get_closure_vars

        if source == "L":
            return f_locals
        if source == "G":
            return self._scope["G"]
        return eval(source, {**_get_closure_vars(), **self._scope}, {"L": f_locals})

    def listen(self, hook: Callable[[dict[str, Any]], bool]) -> None:
        """Have `hook` called with the locals of a call when all guards hold. Where it says False, they do not."""
        self.root.add_epilogue_lambda_guard(hook, [OURS], None)


def guards_of(wrapper: Any) -> Guards:
    """The tree that Dynamo keeps in a wrapper; one without guards, if what they are about is gone."""
    scope = wrapper.global_scope or {"G": {}}
    return Guards(wrapper.root, {**(wrapper.closure_vars or {}), "G": scope["G"]})


def as_in_a_call() -> contextlib.AbstractContextManager[Any]:
    """Undo what Dynamo does while it checks guards, switching `__torch_function__` off, which is a guard itself."""
    return torch._C._EnableTorchFunction()  # pyright: ignore[reportAttributeAccessIssue]


class Leaf(NamedTuple):
    """One check in a tree. `holds` calls it with a value; None if it can only be checked together with others."""

    source: str
    type: str
    code: tuple[str, ...]
    holds: Callable[[Any], bool] | None


def children_of(manager: Any) -> list[Any]:
    from torch._C._dynamo.guards import DictGuardManager

    pairs = manager.get_key_value_managers().values() if isinstance(manager, DictGuardManager) else ()
    return [*(child for pair in pairs for child in pair if child), *manager.get_child_managers()]


def leaves_of(manager: Any) -> list[Leaf]:
    """The checks at one node of a tree; at the root, also those that run last. Ours is none of them."""
    from torch._C._dynamo.guards import RelationalGuard, RootGuardManager

    last = manager.get_epilogue_lambda_guards() if isinstance(manager, RootGuardManager) else []
    found = []
    for guard in [*manager.get_leaf_guards(), *last]:
        code = tuple(guard.verbose_code_parts())
        holds: Any = guard if callable(guard) and not isinstance(guard, RelationalGuard) else None
        if OURS not in code:
            found.append(Leaf(manager.get_source(), type(guard).__name__, code, holds))
    return found


# What filters need: where it is missing, they do without.


def guard_types() -> frozenset[str]:
    """The names of all guard types: the methods in capitals of Dynamo's builder of guards, listed nowhere else.

    Where the builder is missing there are none, and names of types are not checked.
    """
    try:
        from torch._dynamo.guards import GuardBuilder  # not at import: it is heavy
    except ImportError:
        return frozenset()
    return frozenset(name for name in vars(GuardBuilder) if name.isupper())


def unserializable_guard_types() -> frozenset[str]:
    """The guard types that cannot be saved, which ahead-of-time compilation drops. Missing, there are none."""
    try:
        from torch._dynamo.guards import CheckFunctionManager  # not at import: it is heavy
    except ImportError:
        return frozenset()
    return frozenset(getattr(CheckFunctionManager, "UNSUPPORTED_SERIALIZATION_GUARD_TYPES", ()))


def guard_sources(guard: Any) -> tuple[str, ...]:
    """What a guard of Dynamo's is reached from: of "global", "local", "module", "closure" and "state", one or two.

    A guard has a source with a chain of bases; neither is public. What cannot be told is "state".
    """
    chain = [getattr(guard, "originating_source", None)]
    while (base := getattr(chain[-1], "base", None)) is not None:
        chain.append(base)
    root, where, name = chain[-1], getattr(getattr(guard, "source", None), "name", ""), getattr(guard, "name", "")
    is_free = getattr(root, "is_derefed_cell_contents", False) and not getattr(root, "is_input", False)
    told = {
        "global": type(root).__name__ == "GlobalSource",
        "local": "LOCAL" in where and not is_free,
        "closure": is_free or ".__closure__" in name,
        "module": "MODULE" in where,
    }
    return tuple(kind for kind, is_it in told.items() if is_it and name) or ("state",)
