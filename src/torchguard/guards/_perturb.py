"""The ways in which users change the world between two calls."""

import ast
import contextlib
import inspect
import re
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._pytrees import map_tensors

# Defaults of functions and attributes of classes, which nobody changes between two calls.
_NOT_THE_USERS = re.compile(r"\.__\w+__|type\(")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Change:
    """A change that is there while its context is open; the context gives the arguments to call with then."""

    name: str
    made: Callable[[], AbstractContextManager[Arguments]]


def usual_changes(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Change]:
    """What users do to a model, its arguments and the state of torch."""
    given = (args, kwargs)
    changes = [
        _of_arguments("another batch size", given, lambda z: torch.cat([z, z[:1]]) if z.ndim and len(z) else z),
        _of_arguments("other strides", given, _other_strides),
        _of_arguments("another dtype", given, lambda z: z.double() if z.is_floating_point() else z),
        _of_arguments("requires_grad", given, lambda z: z.clone().requires_grad_() if z.is_floating_point() else z),
        _of_state("no_grad", given, torch.no_grad),
        _of_state("autocast", given, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
        _of_state("default dtype", given, _default_dtype),
    ]
    if torch.cuda.is_available():
        changes.append(_of_arguments("another device", given, lambda z: z.cuda() if z.is_cpu else z.cpu()))
    if isinstance(model, nn.Module):
        changes += [
            Change("eval" if model.training else "train", lambda: _other_mode(model, given)),
            Change("model.double()", lambda: _as_double(model, given)),
            Change("a late forward hook", lambda: _hooked(model, given)),
        ]
    return changes


def change_of_value(source: str, value: Any, evaluate: Callable[[str], Any], given: Arguments) -> Change | None:
    """Another value for what a guard is about, such as `L['self'].k` or `G['LIMIT']`; None if it cannot be set."""
    other = _other_value(value)
    setter = None if other is None or _NOT_THE_USERS.search(source) else _setter(source, evaluate)
    if setter is None:
        return None

    @contextlib.contextmanager
    def made() -> Iterator[Arguments]:
        setter(other)
        try:
            yield given
        finally:
            setter(value)

    return Change(f"{source} = {other!r}", made)


def _other_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, float) and 0 <= value <= 1:  # a share, which stays one; or an epsilon, which gets large
        return 1 - value if value != 0.5 else 0.25
    if isinstance(value, (int, float)):
        return value + 1
    return None


def _setter(source: str, evaluate: Callable[[str], Any]) -> Callable[[Any], None] | None:
    """How to assign to an expression: to an attribute, an item, or a variable of an enclosing function."""
    try:
        target = ast.parse(source, mode="eval").body
        if isinstance(target, ast.Attribute):
            owner, name = evaluate(ast.unparse(target.value)), target.attr
            return lambda value: setattr(owner, name, value)
        if isinstance(target, ast.Subscript):
            owner, key = evaluate(ast.unparse(target.value)), ast.literal_eval(target.slice)
            if isinstance(owner, (dict, list)):
                return lambda value: owner.__setitem__(key, value)
    except Exception:  # an expression of Dynamo's own, of which there are many kinds: this one cannot be set
        return None
    return None


def change_of_argument(model: Any, name: str, value: Any, given: Arguments) -> Change | None:
    """Another value for an argument."""
    other = _other_value(value)
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        bound = inspect.signature(function).bind(*given[0], **given[1])
    except (TypeError, ValueError):  # not everything that can be called says how
        return None
    if other is None or name not in inspect.signature(function).parameters:
        return None
    bound.arguments[name] = other
    return Change(f"{name} = {other!r}", lambda: contextlib.nullcontext((bound.args, bound.kwargs)))


def change_of_cell(name: str, cell: types.CellType, given: Arguments) -> Change | None:
    """Another value for a variable of an enclosing function."""
    value = cell.cell_contents
    other = _other_value(value)
    if other is None:
        return None

    @contextlib.contextmanager
    def made() -> Iterator[Arguments]:
        cell.cell_contents = other
        try:
            yield given
        finally:
            cell.cell_contents = value

    return Change(f"{name} = {other!r}", made)


def _of_arguments(name: str, given: Arguments, change: Callable[[Tensor], Tensor]) -> Change:
    return Change(name, lambda: contextlib.nullcontext(map_tensors(given, change)))


def _of_state(name: str, given: Arguments, enter: Callable[[], AbstractContextManager[Any]]) -> Change:
    @contextlib.contextmanager
    def made() -> Iterator[Arguments]:
        with enter():
            yield given

    return Change(name, made)


def _other_strides(z: Tensor) -> Tensor:
    return z.transpose(0, -1).contiguous().transpose(0, -1) if z.ndim > 1 else z


@contextlib.contextmanager
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _other_mode(model: nn.Module, given: Arguments) -> Iterator[Arguments]:
    before = {module: module.training for module in model.modules()}
    model.train(not model.training)
    try:
        yield given
    finally:
        for module, training in before.items():
            module.training = training


@contextlib.contextmanager
def _as_double(model: nn.Module, given: Arguments) -> Iterator[Arguments]:
    before = {name: value.dtype for name, value in [*model.named_parameters(), *model.named_buffers()]}
    model.double()
    try:
        yield map_tensors(given, lambda z: z.double() if z.is_floating_point() else z)
    finally:
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            value.data = value.data.to(before[name])
            if value.grad is not None:
                value.grad.data = value.grad.data.to(before[name])


@contextlib.contextmanager
def _hooked(model: nn.Module, given: Arguments) -> Iterator[Arguments]:
    """On the innermost module that is called last, as far as the order of the model tells."""
    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    handle = leaves[-1].register_forward_hook(lambda module, args, output: map_tensors(output, lambda z: z + 1))
    try:
        yield given
    finally:
        handle.remove()
