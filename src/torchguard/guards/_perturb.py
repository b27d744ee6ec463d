"""Changes that users make between two calls: to arguments, to a model, to guarded values and to the state of torch."""

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

# Defaults of functions and attributes of classes, which users do not change between two calls.
_UNCHANGED = re.compile(r"\.__\w+__|type\(")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Perturbation:
    """A change that lasts while the context that `apply` returns is open; the context returns the call's arguments."""

    name: str
    apply: Callable[[], AbstractContextManager[Arguments]]


def common_perturbations(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Perturbation]:
    """Common changes to a model, its arguments and the state of torch."""
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
            Perturbation("eval" if model.training else "train", lambda: _other_mode(model, given)),
            Perturbation("model.double()", lambda: _as_double(model, given)),
            Perturbation("a late forward hook", lambda: _hooked(model, given)),
        ]
    return changes


def perturb_value(source: str, value: Any, evaluate: Callable[[str], Any], given: Arguments) -> Perturbation | None:
    """Another value for the source of a guard, such as `L['self'].k` or `G['LIMIT']`; None if it cannot be set."""
    other = _other_value(value)
    setter = None if other is None or _UNCHANGED.search(source) else _setter(source, evaluate)
    if setter is None:
        return None

    @contextlib.contextmanager
    def apply() -> Iterator[Arguments]:
        setter(other)
        try:
            yield given
        finally:
            setter(value)

    return Perturbation(f"{source} = {other!r}", apply)


def _other_value(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, float) and 0 <= value <= 1:  # a probability stays one; an epsilon becomes large
        return 1 - value if value != 0.5 else 0.25
    if isinstance(value, (int, float)):
        return value + 1
    return None


def _setter(source: str, evaluate: Callable[[str], Any]) -> Callable[[Any], None] | None:
    """A function that assigns to an expression, which is an attribute or an item; None if it is neither."""
    try:
        target = ast.parse(source, mode="eval").body
        if isinstance(target, ast.Attribute):
            owner, name = evaluate(ast.unparse(target.value)), target.attr
            return lambda value: setattr(owner, name, value)
        if isinstance(target, ast.Subscript):
            owner, key = evaluate(ast.unparse(target.value)), ast.literal_eval(target.slice)
            if isinstance(owner, (dict, list)):
                return lambda value: owner.__setitem__(key, value)
    except Exception:  # one of Dynamo's many kinds of expressions that cannot be assigned to
        return None
    return None


def perturb_argument(model: Any, name: str, value: Any, given: Arguments) -> Perturbation | None:
    """Another value for an argument."""
    other = _other_value(value)
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        bound = inspect.signature(function).bind(*given[0], **given[1])
    except (TypeError, ValueError):  # not every callable has a signature
        return None
    if other is None or name not in inspect.signature(function).parameters:
        return None
    bound.arguments[name] = other
    return Perturbation(f"{name} = {other!r}", lambda: contextlib.nullcontext((bound.args, bound.kwargs)))


def perturb_closure(name: str, cell: types.CellType, given: Arguments) -> Perturbation | None:
    """Another value for a variable of an enclosing function."""
    value = cell.cell_contents
    other = _other_value(value)
    if other is None:
        return None

    @contextlib.contextmanager
    def apply() -> Iterator[Arguments]:
        cell.cell_contents = other
        try:
            yield given
        finally:
            cell.cell_contents = value

    return Perturbation(f"{name} = {other!r}", apply)


def _of_arguments(name: str, given: Arguments, change: Callable[[Tensor], Tensor]) -> Perturbation:
    return Perturbation(name, lambda: contextlib.nullcontext(map_tensors(given, change)))


def _of_state(name: str, given: Arguments, enter: Callable[[], AbstractContextManager[Any]]) -> Perturbation:
    @contextlib.contextmanager
    def apply() -> Iterator[Arguments]:
        with enter():
            yield given

    return Perturbation(name, apply)


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
    """Adds a forward hook to the last leaf module, in the order in which modules are registered."""
    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    handle = leaves[-1].register_forward_hook(lambda module, args, output: map_tensors(output, lambda z: z + 1))
    try:
        yield given
    finally:
        handle.remove()
