"""Which modules of a model are watched."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from torchguard.exceptions import WatchError

LEVELS = ("outputs", "blocks", "modules")


def watched_paths(
    model: nn.Module, level: str, include: Sequence[str] | str | None, exclude: Sequence[str] | str | None
) -> list[str]:
    """The paths of the modules to watch, in the order of the model."""
    if level not in LEVELS:
        raise WatchError(f"watch: level is {level!r}. Give one of {', '.join(LEVELS)}.")
    modules = {path: module for path, module in model.named_modules() if path}
    chosen = {"outputs": _none, "blocks": _blocks, "modules": _with_parameters}[level](modules)
    if level == "blocks" and isinstance(model, (nn.ModuleList, nn.Sequential)):
        chosen = [path for path in modules if "." not in path]
    if include is not None:
        matching = _matching(modules, include, "include")
        chosen = [path for path in (chosen if level != "outputs" else modules) if path in matching]
    if exclude is not None:
        chosen = [path for path in chosen if path not in _matching(modules, exclude, "exclude")]
    return chosen


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
    lists = [path for path, module in modules.items() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    outermost = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    blocks = [path for path in modules if path.rpartition(".")[0] in outermost]
    return blocks or [path for path in modules if "." not in path]


def _matching(modules: Iterable[str], patterns: Sequence[str] | str, name: str) -> set[str]:
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in modules):
            raise WatchError(
                f"watch: {name} has {pattern!r}, which matches no module. Paths look like 'encoder.0.attn'."
            )
    return {path for path in modules if any(fnmatchcase(path, pattern) for pattern in patterns)}
