"""Leaves: the tensors a compiled function takes, each of a fixed type that is checked in every call."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchguard._graphs.listing import short_dtype
from torchguard._torch import fakes
from torchguard.exceptions import CompileError, LeafTypeError


@dataclass(frozen=True)
class LeafType:
    """What a leaf has to be. `dynamic` names the dims that may have another size, by their position."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]
    differentiable: bool
    dynamic: tuple[tuple[int, str], ...] = ()

    def __str__(self) -> str:
        named = dict(self.dynamic)
        sizes = [named.get(dim, str(size)) for dim, size in enumerate(self.shape)]
        where = "" if self.device.type == "cpu" else f" {self.device}"
        return f"{short_dtype(self.dtype)}[{', '.join(sizes)}]{where}"

    def in_full(self) -> str:
        """The type with its strides, where they are not those of a contiguous tensor."""
        return str(self) if self.stride == _contiguous(self.shape) else f"{self} of stride {self.stride}"

    def fake(self) -> Tensor:
        return fakes.fake(self.shape, self.stride, self.dtype, self.device)

    def resized(self, sizes: Sequence[int]) -> "LeafType":
        """The same type at other sizes, dense, with its dims in the same order in memory."""
        order = sorted(range(len(sizes)), key=lambda dim: (-self.stride[dim], dim))
        strides, step = [0] * len(sizes), 1
        for dim in reversed(order):
            strides[dim], step = step, step * (sizes[dim] or 1)
        return replace(self, shape=tuple(sizes), stride=tuple(strides), dynamic=())


@functools.cache
def is_there(device: torch.device) -> bool:
    """Whether this machine, and this build of torch, has a device."""
    if device.type in ("cpu", "meta"):
        return True
    try:
        return torch.get_device_module(device.type).device_count() > (device.index or 0)
    except (RuntimeError, AttributeError):  # how torch says that it knows no such devices, or cannot count them
        return False


def type_of(tensor: Tensor, name: str, *, differentiable: bool | None = None) -> LeafType:
    """The type of an example, which is differentiable if it holds floating point numbers and nothing else is said."""
    if tensor.layout is not torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
        raise CompileError(
            f"compile: leaf {name} is a {type(tensor).__name__} of layout {tensor.layout}. Pass a plain dense tensor."
        )
    if tensor.is_complex():
        raise CompileError(f"compile: leaf {name} is complex. Pass torch.view_as_real(z), and view_as_complex inside.")
    if differentiable is None:
        differentiable = tensor.is_floating_point()
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return LeafType(name, shape, tensor.dtype, tensor.device, stride, differentiable)


def cotangent_type(value: Tensor, name: str) -> LeafType:
    """The type of a seed for a value, or of a tangent: the same, and dense."""
    dense = torch.empty_like(value)
    return LeafType(name, tuple(value.shape), value.dtype, value.device, tuple(dense.stride()), True)


def fits(types: Sequence[LeafType]) -> Callable[[tuple[Any, ...]], bool]:
    """A quick check of a flat tuple of tensors: about 2 us for four. `wrong_with` says the rest."""
    count = len(types)
    expected = [(torch.Size(leaf.shape), leaf.stride, leaf.dtype, leaf.device) for leaf in types]

    def check(leaves: tuple[Any, ...]) -> bool:
        if len(leaves) != count:
            return False
        try:
            for leaf, (shape, stride, dtype, device) in zip(leaves, expected):  # noqa: B905 (quick, and counted above)
                if leaf.shape != shape or leaf.dtype is not dtype or leaf.stride() != stride or leaf.device != device:
                    return False
                if leaf.is_neg():
                    return False
        except (AttributeError, TypeError, RuntimeError):  # no tensor, or one without strides
            return False
        return True

    return check


def wrong_with(leaf: LeafType, value: Any) -> str | None:
    """What about a value does not fit, in words; None if it does. The stride of a dim of size one says nothing."""
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, and a tensor {leaf} was compiled for"
    if value.layout is not torch.strided:
        return f"is of layout {value.layout}, and a dense tensor {leaf} was compiled for"
    if len(value.shape) != len(leaf.shape) or any(
        got != size
        for dim, (got, size) in enumerate(zip(value.shape, leaf.shape, strict=True))
        if dim not in dict(leaf.dynamic)
    ):
        return f"has shape {_sizes(value.shape)}, and {leaf} was compiled for"
    if value.dtype != leaf.dtype:
        return f"is {short_dtype(value.dtype)}, and {leaf} was compiled for"
    if value.device != leaf.device:
        return f"is on {value.device}, and {leaf.device} was compiled for"
    expected = leaf.resized(value.shape).stride if leaf.dynamic else leaf.stride
    if value.numel() > 0 and any(
        got != step for got, step, size in zip(value.stride(), expected, value.shape, strict=True) if size > 1
    ):
        hint = " Call .contiguous() on it." if expected == _contiguous(value.shape) else ""
        return f"has stride {tuple(value.stride())}, and {expected} was compiled for.{hint}"
    if value.is_neg():  # a view that torch negates when it is read, and compiled code does not
        return "is negated lazily. Call .resolve_neg() on it."
    return None


def check_all(types: Sequence[LeafType], values: Sequence[Any], what: str) -> None:
    """Raise for the first of some values that does not fit its type."""
    if len(values) != len(types):
        raise LeafTypeError(f"{what}: got {len(values)} leaves, and {len(types)} were compiled for: {_names(types)}.")
    for leaf, value in zip(types, values, strict=True):
        wrong = wrong_with(leaf, value)
        if wrong is not None:
            raise LeafTypeError(f"{what}: leaf {leaf.name} {wrong}".rstrip(".") + ".")


def with_dynamic(types: Sequence[LeafType], dynamic: Mapping[Any, Any]) -> tuple[LeafType, ...]:
    """Leaf types with dims declared dynamic: `{"x": 0}`, `{"x": [0, 1]}` or `{"x": {0: "batch"}}`."""
    declared = {_name_of(types, key): _named_dims(key, dims) for key, dims in dynamic.items()}
    return tuple(_with_dims(leaf, declared.get(leaf.name, {})) for leaf in types)


def _with_dims(leaf: LeafType, dims: Mapping[int, str]) -> LeafType:
    if not dims:
        return leaf
    nameless = [dim for dim, name in dims.items() if not isinstance(name, str) or not name]
    if nameless:
        raise CompileError(f"compile: dynamic gives dim {nameless[0]} of {leaf.name} no name. Name it: 'batch'.")
    wrong = [dim for dim in dims if not 0 <= dim < len(leaf.shape)]
    if wrong:
        raise CompileError(f"compile: dynamic names dim {wrong[0]} of {leaf.name}, which has {len(leaf.shape)} dims.")
    if leaf.resized(leaf.shape).stride != leaf.stride and leaf.fake().numel() > 0:
        raise CompileError(
            f"compile: {leaf.name} has gaps in memory, so no dim of it can be dynamic. Pass it .contiguous()."
        )
    return replace(leaf, dynamic=tuple(sorted(dims.items())))


def sized(leaf: LeafType, sizes: Mapping[str, Any]) -> LeafType:
    """A leaf type with the sizes its dynamic dims are given, numbers or symbols."""
    if not leaf.dynamic:
        return leaf
    named = dict(leaf.dynamic)
    return leaf.resized([sizes[named[i]] if i in named else size for i, size in enumerate(leaf.shape)])


def sizes_of(types: Sequence[LeafType], values: Sequence[Tensor]) -> dict[str, int]:
    """The size of each dynamic dim in a call, by its name. Dims of one name agree."""
    sizes: dict[str, int] = {}
    for leaf, value in zip(types, values, strict=True):
        for dim, name in leaf.dynamic:
            if sizes.setdefault(name, value.shape[dim]) != value.shape[dim]:
                raise LeafTypeError(
                    f"{leaf.name}: dim {dim} ({name}) is {value.shape[dim]}, and {sizes[name]} elsewhere."
                )
    return sizes


def _name_of(types: Sequence[LeafType], key: Any) -> str:
    names = [leaf.name for leaf in types]
    if isinstance(key, int) and 0 <= key < len(names):
        return names[key]
    if key not in names:
        raise CompileError(f"compile: there is no leaf {key!r}. The leaves are {_names(types)}.")
    return key


def names_to_flags(types: Sequence[LeafType], names: Sequence[Any]) -> list[bool]:
    """Which leaves are named, by name or position."""
    wanted = {_name_of(types, name) for name in names}
    return [leaf.name in wanted for leaf in types]


def _named_dims(key: Any, dims: Any) -> dict[int, str]:
    if isinstance(dims, Mapping):
        return dict(dims)
    return {dim: f"{key}.{dim}" for dim in ([dims] if isinstance(dims, int) else dims)}


def _names(types: Sequence[LeafType]) -> str:
    return ", ".join(f"{leaf.name}: {leaf}" for leaf in types)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def _sizes(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"
