"""What is watched: which checks run, on which modules, and which arguments are masks that no check touches."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchguard._channel.codes import FREE_CODES, ErrorCode, code_named
from torchguard._torch.modules import mixes_samples
from torchguard._torch.tracing import constant_in_graphs
from torchguard.exceptions import WatchError

DEFAULT_CHECKS = ("nan", "inf", "indices")
LEVELS = ("outputs", "blocks", "modules")
# Names of arguments in which -Inf is no fault.
_MASK = re.compile("mask|bias", re.IGNORECASE)
# From this number on, it pays off to compile blocks that are alike once.
_MANY_ALIKE = 4


class Check(NamedTuple):
    """A check of whole samples: `function` maps `(batch, values)` to a mask, True for a sample to warn about."""

    code: int
    function: Callable[..., Any]
    message: str = ""


class Checks(NamedTuple):
    """Which checks run. One scan finds both NaN and Inf; each of `others` reads the values once more."""

    nan: bool
    inf: bool
    indices: bool
    others: tuple[Check, ...]


def checks_of(asked: Iterable[Any]) -> Checks:
    """The checks that `checks=` asks for: names, `("overflow", 0.9)`, or `(name, function, message)`."""
    names, others = set(), []
    for check in asked:
        match check:
            case "nan" | "inf" | "indices":
                names.add(check)
            case "overflow":
                others.append(_near_overflow(0.9))
            case ("overflow", float() | int() as share) if 0 < share <= 1:
                others.append(_near_overflow(share))
            case str() if check in _QUALITY:
                others.append(_QUALITY[check])
            case (str() as name, function) if name and callable(function):
                others.append(Check(_own_code(name), function))
            case (str() as name, function, str() as message) if name and callable(function):
                others.append(Check(_own_code(name), function, message))
            case _:
                known = ", ".join((*DEFAULT_CHECKS, "overflow", *_QUALITY))
                raise WatchError(
                    f"watch: checks has {check!r}. Give one of {known}, ('overflow', share of the largest number), "
                    "(name, function), or (name, function, message)."
                )
    return Checks("nan" in names, "inf" in names, "indices" in names, tuple(others))


def _own_code(name: str) -> int:
    code = code_named(name.upper())
    if code is None:
        taken = ", ".join(ErrorCode.name(code) for code in FREE_CODES)
        raise WatchError(
            f"watch: no code is left for {name!r}: all models share three codes for their own checks, and {taken} have "
            "them. Use one of these names, or drop a check."
        )
    return code


def _near_overflow(share: float) -> Check:
    def is_near(values: Tensor) -> Tensor:
        largest = values.abs().amax(-1)
        return (largest >= share * torch.finfo(values.dtype).max) & largest.isfinite()

    return Check(ErrorCode.OVERFLOW, is_near)


def _zero(values: Tensor) -> Tensor:
    return values.abs().amax(-1) == 0


def _constant(values: Tensor) -> Tensor:
    return values.amax(-1) == values.amin(-1)


def _saturated(values: Tensor) -> Tensor:
    """Every value has the magnitude of the largest, to a hundredth: what a saturated tanh or sigmoid returns."""
    magnitude = values.abs()
    largest = magnitude.amax(-1)
    return (magnitude.amin(-1) >= 0.99 * largest) & (largest > 0) & largest.isfinite()


_QUALITY = {
    "zero": Check(ErrorCode.ZERO_OUTPUT, _zero),
    "constant": Check(ErrorCode.CONSTANT_OUTPUT, _constant),
    "saturated": Check(ErrorCode.SATURATED, _saturated),
}


def watched_paths(
    model: nn.Module, level: str, include: Sequence[str] | str | None, exclude: Sequence[str] | str | None
) -> list[str]:
    """The paths of the modules to watch, in the order of the model."""
    if level not in LEVELS:
        raise WatchError(f"watch: level is {level!r}. Give one of {', '.join(LEVELS)}.")
    modules = {path: module for path, module in model.named_modules() if path}
    chosen = {"outputs": _none, "blocks": _blocks, "modules": _with_parameters}[level](model)
    if include is not None:
        matching = _matching(modules, include, "include")
        chosen = [path for path in (chosen if level != "outputs" else modules) if path in matching]
    if exclude is not None:
        chosen = [path for path in chosen if path not in _matching(modules, exclude, "exclude")]
    return chosen


def blocks_to_compile_once(model: nn.Module, which: bool | Sequence[str] | str | None) -> list[str]:
    """The paths of the modules that become regions, none of them inside another, in the order of the model.

    With True, the items of the lists of modules; with None, those of which several are alike. Left out are modules with
    batch norms, which write to their buffers, with recurrent layers, whose states have the samples along another dim,
    and with a module that belongs to another part of the model: its location is there.
    """
    if which is not None and not which:
        return []
    modules = {path: module for path, module in model.named_modules() if path}
    if which is None or which is True:
        found = _in_lists(model)
    else:
        matching = _matching([path for path, module in modules.items() if _is_called(module)], which, "compile_once")
        found = [path for path in modules if path in matching]
    found = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    known = {module: path for path, module in modules.items()}
    suitable = [
        path for path in found if all(_is_suitable(part, known[part], path) for part in modules[path].modules())
    ]
    if which is None:
        alike = Counter(_outline(modules[path]) for path in suitable)
        return [path for path in suitable if alike[_outline(modules[path])] >= _MANY_ALIKE]
    if not suitable and found:
        raise WatchError(
            f"watch: there is nothing to compile once: all blocks ({found[0]!r} is one) have batch norms or recurrent "
            "layers, or hold modules of other parts of the model. Give compile_once patterns of other paths."
        )
    if not suitable:
        raise WatchError("watch: compile_once=True, but the model has no list of modules. Give patterns of paths.")
    return suitable


def _outline(block: nn.Module) -> tuple[Any, ...]:
    """What blocks that are alike have in common."""
    return type(block), *((name, None if is_lazy(p) else p.shape, p.dtype) for name, p in block.named_parameters())


def _is_suitable(part: nn.Module, path: str, block: str) -> bool:
    return not mixes_samples(part) and not isinstance(part, nn.RNNBase) and f"{path}.".startswith(f"{block}.")


def other_embeddings(model: nn.Module, chosen: Sequence[str], exclude: Sequence[str] | str | None) -> list[str]:
    """The paths of embeddings that are not watched otherwise: their indices are checked all the same."""
    modules = dict(model.named_modules())
    left_out = _matching(modules, exclude, "exclude") if exclude is not None else set()
    embeddings = [path for path, module in modules.items() if path and looks_up_its_argument(module)]
    return [path for path in embeddings if path not in left_out and path not in chosen]


def protected_paths(model: nn.Module, watched: Sequence[str], exclude: Sequence[str] | str | None) -> list[str]:
    """The modules with parameters that are not watched. Quarantine replaces non-finite values there all the same.

    Otherwise their parameters would get NaN gradients: the activations that they save would not be finite.
    """
    modules = [path for path, _ in model.named_modules()]
    left_out = _matching(modules, exclude, "exclude") if exclude is not None else set()
    return [path for path in _with_parameters(model) if path not in left_out and path not in watched]


def enclosing_location(path: str, paths: Sequence[str]) -> int:
    """The location at which a fault of a module that is not watched is recorded: the watched module around it.

    Without one, it is the model itself, the last of the locations.
    """
    around = [i for i, other in enumerate(paths[1:-1], start=1) if f"{path}.".startswith(f"{other}.")]
    return max(around, key=lambda i: len(paths[i]), default=len(paths) - 1)


def sample_dims(paths: Sequence[str], sample_of: Mapping[str, int]) -> dict[int, int]:
    """By location, the dim along which the samples lie, from the dim for each glob pattern."""
    found = {}
    for pattern, dim in sample_of.items():
        matching = [i for i, path in enumerate(paths) if i > 0 and fnmatchcase(path, pattern)]
        if not matching or not isinstance(dim, int) or dim < 0:
            raise WatchError(
                f"watch: sample_of has {pattern!r}: {dim!r}. Give a pattern of the paths of watched modules, '' for "
                "the model itself, and the dim of its tensors along which the samples lie, from 0."
            )
        found.update(dict.fromkeys(matching, dim))
    return found


def looks_up_its_argument(module: nn.Module) -> bool:
    """Whether the argument of a module is what indexes its `weight`: an embedding that runs torch's own `forward`.

    A `forward` of its own may hash its argument, take -1 for "missing", or make positions of token ids.
    """
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and "forward" not in module.__dict__
    )


def _none(model: nn.Module) -> list[str]:
    return []


def _with_parameters(model: nn.Module) -> list[str]:
    modules = [(path, module) for path, module in model.named_modules() if path]
    return [path for path, module in modules if any(True for _ in module.parameters(recurse=False))]


def _blocks(model: nn.Module) -> list[str]:
    """The items of the outermost lists of modules; the model's parts where it has none."""
    return _in_lists(model) or [path for path, _ in model.named_modules() if path and "." not in path]


def _in_lists(model: nn.Module) -> list[str]:
    """The items of the outermost lists, each by its first path. An item that is itself a list stands for its items."""
    modules = dict(model.named_modules())
    lists = [path for path, module in modules.items() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    outermost = [
        path
        for path in lists
        if not any(path != other and f"{path}.".startswith(f"{other}." if other else "") for other in lists)
    ]
    return [item for path in outermost for item in _items(path, modules[path]) if item in modules]


def _items(path: str, module: nn.Module) -> list[str]:
    found = []
    for name, child in module.named_children():
        at = f"{path}.{name}" if path else name
        found += [at] if _is_called(child) else _items(at, child)
    return found


def _is_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _matching(modules: Iterable[str], patterns: Sequence[str] | str, name: str) -> set[str]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in modules):
            raise WatchError(
                f"watch: {name} has {pattern!r}, which matches no module. Paths look like 'encoder.0.attn'."
            )
    return {path for path in modules if any(fnmatchcase(path, pattern) for pattern in patterns)}


def mask_positions(module: nn.Module) -> tuple[int, ...]:
    """Which positional arguments of a module are masks, by their names."""
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):  # not every callable has a signature
        return ()
    return tuple(i for i, name in enumerate(names) if _MASK.search(name))


def argument_names(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the arguments of a module: of those that can be given by position, and of the others."""
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # not every callable has a signature
        return (), ()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = tuple(one.name for one in parameters if one.kind in by_position)
    return positional, tuple(one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY)


@constant_in_graphs
def is_mask(name: str) -> bool:
    """Whether a keyword argument is a mask, by its name."""
    return _MASK.search(name) is not None


def norm_widths(model: nn.Module) -> tuple[int, ...]:
    """The lengths of the vectors that layers named as norms scale, in a graph of the model: see `detect.scan`."""
    norms = (module for module in model.modules() if "norm" in type(module).__name__.lower())
    scales = (p for module in norms for p in module.parameters(recurse=False) if not is_lazy(p))
    return tuple(sorted({p.shape[0] for p in scales if p.ndim == 1}))
