"""Changes that users make between two calls: to arguments, to a model, to guarded values and to the state of torch."""

import ast
import contextlib
import copy
import dataclasses
import enum
import functools
import inspect
import re
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from torchguard._pytrees import map_tensors

# Defaults of functions, attributes of classes and modules of Python, which users do not change between two calls.
_UNCHANGED = re.compile(r"\.__\w+__|type\(|G\['__")
# The dicts in which every module keeps its children and tensors.
OWN_DICTS = ("_modules", "_parameters", "_buffers")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Perturbation:
    """A change that lasts while the context that `apply` returns is open; the context returns the call's arguments.

    With `compiles`, Dynamo may compile for it. What it compiles is there when the changes after it are made.
    """

    name: str
    apply: Callable[[], AbstractContextManager[Arguments]]
    compiles: bool = False


def common_perturbations(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Perturbation]:
    """Common changes to a model, its arguments and the state of torch."""
    given = (args, kwargs)
    changes = [
        dataclasses.replace(_of_arguments("another batch size", given, _larger), compiles=True),
        _of_arguments("other strides", given, _other_strides),
        _of_arguments("another dtype", given, _as_double),
        _of_arguments("requires_grad", given, lambda z: z.clone().requires_grad_() if z.is_floating_point() else z),
        _of_state("no_grad", given, torch.no_grad),
        _of_state("autocast", given, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
        _of_state("default dtype", given, _default_dtype),
    ]
    if torch.cuda.is_available():
        changes.append(_of_arguments("another device", given, lambda z: z.cuda() if z.is_cpu else z.cpu()))
    if isinstance(model, nn.Module):
        changes += [
            Perturbation("eval" if model.training else "train", lambda: _in_other_mode(model, given)),
            Perturbation("model.double()", lambda: _restoring(model, map_tensors(given, _as_double), model.double)),
            *_of_structure(model, given),
        ]
    return changes


def _of_structure(model: nn.Module, given: Arguments) -> list[Perturbation]:
    """Changes to what a model consists of, each to one module: the last without children, or the first that has it."""
    modules = [*model.modules()]
    leaf = [module for module in modules if not any(True for _ in module.children())][-1]
    parent = next((one for one in modules if leaf in one.children()), None)
    lists = [one for one in modules if isinstance(one, (nn.ModuleList, nn.Sequential)) and len(one)]
    weighted = [one for one in modules if isinstance(getattr(one, "weight", None), nn.Parameter)]
    changes: dict[str, Callable[[], Any]] = {
        "a late forward hook": lambda: leaf.register_forward_hook(lambda module, args, output: _shifted(output)),
        "a patched forward": lambda: setattr(leaf, "forward", _shifting(leaf.forward)),
        "another __class__": lambda: setattr(leaf, "__class__", _subclass(type(leaf))),
        "parameters without gradients": lambda: model.requires_grad_(False),
    }
    for name in OWN_DICTS:
        changes[f"{name} of another type"] = lambda name=name: [_reorder(vars(module), name) for module in modules]
    if parent is not None:
        name = next(name for name, child in parent.named_children() if child is leaf)
        changes["another submodule"] = lambda: setattr(parent, name, _Shifted(leaf))
    if lists:
        changes["a child removed"] = lambda: lists[0].__delitem__(-1)
        changes["a child added"] = lambda: lists[0].append(copy.deepcopy(lists[0][-1]))
    if weighted:
        register = parametrize.register_parametrization
        changes["a parametrized weight"] = lambda: register(weighted[0], "weight", _Doubled(), unsafe=True)
    return [
        Perturbation(name, lambda change=change: _restoring(model, given, change)) for name, change in changes.items()
    ]


@contextlib.contextmanager
def _restoring(model: nn.Module, given: Arguments, change: Callable[[], Any]) -> Iterator[Arguments]:
    """Undo a change to modules: their class, attributes, what the dicts among these hold, parameters and gradients."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    tensors = [(one, one.data, one.requires_grad) for one in [*model.parameters(), *(grad for _, grad in gradients)]]
    dicts = []
    for module in model.modules():
        held = [(one, dict(one)) for one in vars(module).values() if isinstance(one, dict)]
        dicts.append((module, type(module), [(vars(module), dict(vars(module))), *held]))
    try:
        change()
        yield given
    finally:
        for module, cls, contents in dicts:
            if type(module) is not cls:
                module.__class__ = cls
            for one, before in contents:
                one.clear()
                one.update(before)
        for tensor, data, requires_grad in tensors:
            tensor.data = data
            tensor.requires_grad_(requires_grad)
        for parameter, grad in gradients:
            parameter.grad = grad


def _shifted(output: Any) -> Any:
    return map_tensors(output, lambda z: z + 1)


def _shifting(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose results differ from those of the given one."""
    return lambda *args, **kwargs: _shifted(function(*args, **kwargs))


def _subclass(cls: type) -> type:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _shifted(cls.forward(self, *args, **kwargs))  # pyright: ignore[reportAttributeAccessIssue]

    return type(cls.__name__, (cls,), {"forward": forward})


class _Shifted(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _shifted(self.inner(*args, **kwargs))


class _Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def _reorder(attributes: dict[str, Any], name: str) -> None:
    """An ordered dict with the same items, as models saved by an earlier torch have it."""
    attributes[name] = OrderedDict(attributes[name])


def perturb_value(source: str, value: Any, evaluate: Callable[[str], Any], given: Arguments) -> list[Perturbation]:
    """Other values for the source of a guard, such as `L['self'].k` or `G['LIMIT']`; none if it cannot be set."""
    others = [] if _UNCHANGED.search(source) else _other_values(value)
    setter = _setter(source, value, evaluate) if others else None
    return [] if setter is None else [_of_setter(source, setter, value, other, given) for other in others]


def perturb_closure(name: str, cell: types.CellType, given: Arguments) -> list[Perturbation]:
    """Other values for a variable of an enclosing function."""

    def setter(value: Any) -> None:
        cell.cell_contents = value

    value = cell.cell_contents
    return [_of_setter(name, setter, value, other, given) for other in _other_values(value)]


def perturb_argument(model: Any, name: str, value: Any, given: Arguments) -> list[Perturbation]:
    """Other values for an argument."""
    function = model.forward if isinstance(model, nn.Module) else model
    try:
        signature = inspect.signature(function)
        bound = signature.bind(*given[0], **given[1])
    except (TypeError, ValueError):  # not every callable has a signature
        return []
    found = []
    for other in _other_values(value) if name in signature.parameters else ():
        changed = inspect.BoundArguments(signature, OrderedDict({**bound.arguments, name: other}))
        arguments = (changed.args, changed.kwargs)
        found.append(_perturbation(name, other, lambda arguments=arguments: contextlib.nullcontext(arguments)))
    return found


def _of_setter(name: str, setter: Callable[[Any], None], value: Any, other: Any, given: Arguments) -> Perturbation:
    @contextlib.contextmanager
    def apply() -> Iterator[Arguments]:
        setter(other)
        try:
            yield given
        finally:
            setter(value)

    return _perturbation(name, other, apply)


def _perturbation(name: str, other: Any, apply: Callable[[], AbstractContextManager[Arguments]]) -> Perturbation:
    if isinstance(other, (list, tuple)):
        return Perturbation(f"{name} with an item more", apply)
    return Perturbation(f"{name} = {'another function' if callable(other) else repr(other)}", apply)


def _other_values(value: Any) -> list[Any]:
    """Other values of the same kind; none where no other valid value can be guessed, as of a string."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, enum.Enum):
        return [member for member in type(value) if member is not value]
    if isinstance(value, float) and 0 <= value <= 1:  # a probability stays one; an epsilon becomes large
        return [1 - value if value != 0.5 else 0.25]
    if isinstance(value, (int, float)):
        return [value + 1]
    if type(value) in (list, tuple) and value:
        return [value + value[-1:]]
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return [_shifting(value)]
    return []


def _setter(source: str, value: Any, evaluate: Callable[[str], Any]) -> Callable[[Any], None] | None:
    """A function that assigns to an expression; None if `value`, which it has, cannot be assigned to it."""
    try:
        target = ast.parse(source, mode="eval").body
        if isinstance(target, ast.Attribute):
            owner, name = evaluate(ast.unparse(target.value)), target.attr
            setter = functools.partial(setattr, owner, name)
        elif isinstance(target, ast.Subscript):
            owner, key = evaluate(ast.unparse(target.value)), ast.literal_eval(target.slice)
            setter = functools.partial(owner.__setitem__, key)
        else:
            return None
        setter(value)
    except Exception:  # one of Dynamo's many kinds of expressions, or a value that is read-only
        return None
    return setter


def _of_arguments(name: str, given: Arguments, change: Callable[[Tensor], Tensor]) -> Perturbation:
    return Perturbation(name, lambda: contextlib.nullcontext(map_tensors(given, change)))


def _of_state(name: str, given: Arguments, enter: Callable[[], AbstractContextManager[Any]]) -> Perturbation:
    @contextlib.contextmanager
    def apply() -> Iterator[Arguments]:
        with enter():
            yield given

    return Perturbation(name, apply)


def _larger(z: Tensor) -> Tensor:
    return torch.cat([z, z[:1]]) if z.ndim and len(z) else z


def _as_double(z: Tensor) -> Tensor:
    # The largest dtype: stale code that reads it as a smaller one stays within the tensor.
    return z.double() if z.is_floating_point() else z


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
def in_other_mode(model: nn.Module) -> Iterator[None]:
    """Training, if the model is in evaluation mode, and the other way round."""
    before = {module: module.training for module in model.modules()}
    model.train(not model.training)
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


@contextlib.contextmanager
def _in_other_mode(model: nn.Module, given: Arguments) -> Iterator[Arguments]:
    with in_other_mode(model):
        yield given
