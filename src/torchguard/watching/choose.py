"""Which modules of a model are watched."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from torchguard._torch import mixes_rows
from torchguard.exceptions import WatchError

LEVELS = ("outputs", "blocks", "modules")
_LISTS = (nn.ModuleList, nn.ModuleDict)


def watched_paths(
    model: nn.Module, level: str, include: Sequence[str] | str | None, exclude: Sequence[str] | str | None
) -> list[str]:
    """The paths of the modules to watch, in the order of the model."""
    if level not in LEVELS:
        raise WatchError(f"watch: level is {level!r}. Give one of {', '.join(LEVELS)}.")
    modules = {path: module for path, module in model.named_modules() if path}
    chosen = {"outputs": _none, "blocks": _blocks, "modules": _with_parameters}[level](modules)
    if level == "blocks" and _is_list(model):
        chosen = [path for path in modules if "." not in path]
    if include is not None:
        matching = _matching(modules, include, "include")
        chosen = [path for path in (chosen if level != "outputs" else modules) if path in matching]
    if exclude is not None:
        chosen = [path for path in chosen if path not in _matching(modules, exclude, "exclude")]
    return chosen


def blocks_to_compile_once(model: nn.Module, which: bool | Sequence[str] | str) -> list[str]:
    """The paths of the modules that are regions of their own, none of them within another.

    With True, the items of the outermost lists of modules. Left out are modules that have batch norms, which write to
    their buffers, and those that share a part with another, whose place is there.
    """
    if which is False:
        return []
    # A list is never called.
    modules = {path: module for path, module in model.named_modules() if path and not isinstance(module, _LISTS)}
    if which is True:
        found = _in_lists(dict(model.named_modules()))
    else:
        matching = _matching(modules, which, "compile_once")
        found = [path for path in modules if path in matching]
    found = [path for path in found if not any(path.startswith(f"{other}.") for other in found)]
    known = {module: path for path, module in model.named_modules()}
    fit = [
        path
        for path in found
        if not any(mixes_rows(part) or not f"{known[part]}.".startswith(f"{path}.") for part in modules[path].modules())
    ]
    if not fit:
        why = "The model has no list of modules. Give patterns of paths."
        if found:
            why = (
                f"{found[0]!r} and {len(found) - 1} more have batch norms, or share modules with the rest of the model."
            )
        raise WatchError(f"watch: compile_once, but there is nothing to compile once. {why}")
    return fit


def other_embeddings(model: nn.Module, chosen: Sequence[str], exclude: Sequence[str] | str | None) -> list[str]:
    """The paths of embeddings that are not watched otherwise: their indices are looked at all the same."""
    modules = dict(model.named_modules())
    left_out = _matching(modules, exclude, "exclude") if exclude is not None else set()
    embeddings = [path for path, module in modules.items() if path and isinstance(module, nn.Embedding)]
    return [path for path in embeddings if path not in left_out and path not in chosen]


def _none(modules: dict[str, nn.Module]) -> list[str]:
    return []


def _with_parameters(modules: dict[str, nn.Module]) -> list[str]:
    return [path for path, module in modules.items() if any(True for _ in module.parameters(recurse=False))]


def _blocks(modules: dict[str, nn.Module]) -> list[str]:
    """The items of the outermost lists of modules; the model's parts where it has none."""
    return _in_lists(modules) or [path for path in modules if "." not in path]


def _in_lists(modules: dict[str, nn.Module]) -> list[str]:
    """The items of the outermost lists; of the model itself, if it is one."""
    lists = [path for path, module in modules.items() if _is_list(module)]
    outermost = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    return [path for path in modules if path and path.rpartition(".")[0] in outermost]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential))


def _matching(modules: Iterable[str], patterns: Sequence[str] | str, name: str) -> set[str]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in modules):
            raise WatchError(
                f"watch: {name} has {pattern!r}, which matches no module. Paths look like 'encoder.0.attn'."
            )
    return {path for path in modules if any(fnmatchcase(path, pattern) for pattern in patterns)}
