"""The example that a model is exported with: its arguments, their names, and where the samples lie in them."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ShapesCollection

from torchguard._pytrees import map_tensors, tensors_in
from torchguard._watch.arguments import batch_of
from torchguard.exceptions import ExportError

Dims = Mapping[str, Mapping[int, Any]]


class Example:
    """The arguments of one call.

    Args:
        given: one tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        dim: the dim along which the samples lie.
    """

    def __init__(self, model: nn.Module, given: Any, dim: int) -> None:
        self.args: tuple[Any, ...] = () if isinstance(given, Mapping) else given if type(given) is tuple else (given,)
        self.kwargs: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {}
        self.dim = dim
        found = tensors_in((self.args, self.kwargs))
        if not found:
            raise ExportError(
                f"export: the example ({type(given).__name__}) holds no tensor. Give one tensor, a tuple of arguments "
                "or a dict of keyword arguments."
            )
        self.size: int = batch_of(self.args, self.kwargs, dim).size
        self.tensors = [z for _, z in found]
        self.names = _names(model, [keys for keys, _ in found])

    def has_samples(self, z: Tensor) -> bool:
        return z.ndim > self.dim and z.shape[self.dim] == self.size

    def mapped(self, fn: Any) -> "tuple[tuple[Any, ...], dict[str, Any]]":
        """The arguments with `fn` applied to each tensor."""
        return map_tensors(self.args, fn), map_tensors(self.kwargs, fn)

    def shapes(self, batch: tuple[int, int | None], dims: Dims) -> ShapesCollection | None:
        """The dims that vary, as `torch.export` takes them."""
        varying, shapes = self.varying(batch, dims), ShapesCollection()
        for name, z in zip(self.names, self.tensors, strict=True):
            if name in varying:
                shapes[z] = varying[name]
        return shapes if varying else None

    def varying(self, batch: tuple[int, int | None], dims: Dims) -> dict[str, dict[int, Any]]:
        """The dims of each input that vary: that of the samples within `batch`, and those that the user named."""
        low, high = batch
        if high is not None and not 0 < low <= high:
            raise ExportError(f"export: batch is {batch}. Give (min, max) with 1 <= min <= max, max=None for no limit.")
        if unknown := [name for name in dims if name not in self.names]:
            raise ExportError(f"export: dims has {unknown[0]!r}, but the inputs are {', '.join(self.names)}.")
        named: dict[str, Any] = {}
        if low != high:
            if self.size < 2:
                raise ExportError(
                    f"export: an example of {self.size} sample cannot stand for a batch that varies: torch would take "
                    "1 for a constant. Give an example of two samples or more, or batch=(1, 1)."
                )
            named["batch"] = Dim("batch", min=low) if high is None else Dim("batch", min=low, max=high)
        varying: dict[str, dict[int, Any]] = {}
        for name, z in zip(self.names, self.tensors, strict=True):
            of_input = {self.dim: named["batch"]} if low != high and self.has_samples(z) else {}
            for at, dim in dims.get(name, {}).items():
                of_input[at] = named.setdefault(dim, Dim(dim)) if isinstance(dim, str) else dim
            if of_input:
                varying[name] = of_input
        return varying


def _names(model: nn.Module, paths: Sequence[tuple[Any, ...]]) -> tuple[str, ...]:
    """A name for each tensor: that of its parameter, and the keys that lead to it from there."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [name for name, one in inspect.signature(model.forward).parameters.items() if one.kind in kinds]
    names = []
    for is_keyword, first, *rest in paths:
        name = first if is_keyword else parameters[first] if first < len(parameters) else f"input_{first}"
        names.append(".".join(map(str, [name, *rest])))
    return tuple(names)


def resized(example: Example, size: int) -> "tuple[tuple[Any, ...], dict[str, Any]]":
    """The arguments with another number of samples: those of the example, again and again."""
    rows = torch.arange(size) % example.size

    def resize(z: Tensor) -> Tensor:
        return z.index_select(example.dim, rows.to(z.device)) if example.has_samples(z) else z

    return example.mapped(resize)
