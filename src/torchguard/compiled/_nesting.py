"""How a function's arguments and results are nested: taken apart into tensors, and put together again."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchguard._torch.tensors import Structure, flatten, leaf_paths, unflatten
from torchguard.exceptions import CompileError, LeafTypeError


@dataclass(frozen=True)
class Nest:
    """The shape of a value that holds tensors, at some `places` among its leaves, and None at the others."""

    structure: Structure
    places: tuple[int, ...]
    count: int
    is_tensor: bool
    is_tuple: bool

    def take_apart(self, value: Any, what: str) -> list[Any]:
        """The tensors in a value nested as this one."""
        leaves, structure = flatten(value)
        if structure != self.structure:
            raise LeafTypeError(f"{what}: got {_shape_of(value)}, which is not nested as what was compiled for.")
        return [leaves[place] for place in self.places]

    def put_together(self, tensors: Sequence[Any]) -> Any:
        if self.is_tensor:
            return tensors[0]
        if self.is_tuple:
            return tuple(tensors)
        leaves: list[Any] = [None] * self.count
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return unflatten(leaves, self.structure)


def nest_of(value: Any, what: str, advice: str) -> tuple[Nest, list[Tensor]]:
    """How a value is nested, and the tensors in it. Anything else in it is refused."""
    leaves, structure = flatten(value)
    names = leaf_paths(value)
    for leaf, name in zip(leaves, names, strict=True):
        if leaf is not None and not isinstance(leaf, Tensor):
            raise CompileError(f"{what}{name} is a {type(leaf).__name__}. {advice}")
    places = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    is_tuple = type(value) is tuple and all(isinstance(part, Tensor) for part in value)
    nest = Nest(structure, places, len(leaves), isinstance(value, Tensor), is_tuple)
    return nest, [leaves[place] for place in places]


def leaf_names(f: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    """A name for each tensor in the arguments of a function: `x`, `batch['mask']`; a module's own for its state."""
    is_module = isinstance(f, nn.Module)
    parameters = _parameter_names(f.forward if is_module else f, len(args) - is_module)
    names: list[str] = list(args[0]) if is_module else []
    for parameter, arg in zip(parameters, args[is_module:], strict=True):
        found, _ = flatten(arg)
        paths = leaf_paths(arg)
        names += [f"{parameter}{path}" for path, leaf in zip(paths, found, strict=True) if leaf is not None]
    return _told_apart(names)


def _parameter_names(f: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # builtins have none
        return [f"x{i}" for i in range(count)]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    return named + [f"x{i}" for i in range(len(named), count)]


def _told_apart(names: Sequence[str]) -> list[str]:
    """Names with those that occur twice numbered: an argument may be called as a parameter of the module is."""
    seen: dict[str, int] = {}
    told = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        told.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return told


def _shape_of(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list, dict)) else type(value).__name__
