"""Which modules of a model are watched."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from torchguard._torch import mixes_rows
from torchguard.exceptions import WatchError

LEVELS = ("outputs", "blocks", "modules")


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


def blocks_to_compile_once(model: nn.Module, which: bool | Sequence[str] | str) -> list[str]:
    """The paths of the modules that are regions of their own, none of them within another, in the order of the model.

    With True, the items of the lists of modules. Left out are modules that have batch norms, which write to their
    buffers, or recurrent layers, whose states have the samples elsewhere, and those that hold a module of another part
    of the model: that is where its place is.
    """
    if not which:
        return []
    modules = {path: module for path, module in model.named_modules() if path}
    if which is True:
        found = _in_lists(model)
    else:
        matching = _matching([path for path, module in modules.items() if _is_called(module)], which, "compile_once")
        found = [path for path in modules if path in matching]
    found = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    known = {module: path for path, module in modules.items()}
    fit = [path for path in found if all(_fits(part, known[part], path) for part in modules[path].modules())]
    if not fit and found:
        raise WatchError(
            f"watch: there is nothing to compile once: all blocks ({found[0]!r} is one) have batch norms or recurrent "
            "layers, or hold modules of other parts of the model. Give patterns of other paths."
        )
    if not fit:
        raise WatchError("watch: compile_once=True, but the model has no list of modules. Give patterns of paths.")
    return fit


def _fits(part: nn.Module, known_as: str, block: str) -> bool:
    return not mixes_rows(part) and not isinstance(part, nn.RNNBase) and f"{known_as}.".startswith(f"{block}.")


def other_embeddings(model: nn.Module, chosen: Sequence[str], exclude: Sequence[str] | str | None) -> list[str]:
    """The paths of embeddings that are not watched otherwise: their indices are looked at all the same."""
    modules = dict(model.named_modules())
    left_out = _matching(modules, exclude, "exclude") if exclude is not None else set()
    embeddings = [path for path, module in modules.items() if path and isinstance(module, nn.Embedding)]
    return [path for path in embeddings if path not in left_out and path not in chosen]


def _none(model: nn.Module) -> list[str]:
    return []


def _with_parameters(model: nn.Module) -> list[str]:
    modules = [(path, module) for path, module in model.named_modules() if path]
    return [path for path, module in modules if any(True for _ in module.parameters(recurse=False))]


def _blocks(model: nn.Module) -> list[str]:
    """The items of the outermost lists of modules; the model's parts where it has none."""
    return _in_lists(model) or [path for path, _ in model.named_modules() if path and "." not in path]


def _in_lists(model: nn.Module) -> list[str]:
    """The items of the outermost lists; of one that is never called, its items in turn. Each by its first path."""
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
