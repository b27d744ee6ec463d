"""Leaves: the tensors that a compiled function takes, with the type of each, which every call checks.

Tangents of leaves and cotangents of outputs have types too. They may be passed in any layout, and are copied into the
strides that the code was compiled for.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchguard._graphs.listing import short_dtype
from torchguard._pytrees import PytreeSpec
from torchguard._torch import fakes
from torchguard.exceptions import CompileError, LeafTypeError


@dataclass(frozen=True)
class LeafType:
    """The type of a leaf. `dynamic` holds the position and the name of each dim that may have another size."""

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
        """The type, with its strides if it is not contiguous."""
        return str(self) if self.stride == _contiguous(self.shape) else f"{self} of stride {self.stride}"

    def fake(self) -> Tensor:
        return fakes.fake(self.shape, self.stride, self.dtype, self.device)

    def resized(self, sizes: Sequence[int]) -> "LeafType":
        """The same type at other sizes: dense, with the same order of dims in memory."""
        order = sorted(range(len(sizes)), key=lambda dim: (-self.stride[dim], dim))
        strides, step = [0] * len(sizes), 1
        for dim in reversed(order):
            strides[dim], step = step, step * (sizes[dim] or 1)
        return replace(self, shape=tuple(sizes), stride=tuple(strides), dynamic=())


@functools.cache
def is_available(device: torch.device) -> bool:
    """Whether this machine and this build of torch have a device."""
    if device.type in ("cpu", "meta"):
        return True
    try:
        return torch.get_device_module(device.type).device_count() > (device.index or 0)
    except (RuntimeError, AttributeError):  # torch knows no such devices, or cannot count them
        return False


def type_of(tensor: Tensor, name: str) -> LeafType:
    """The type of an example. It is differentiable if its dtype is a floating point one."""
    if tensor.layout is not torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
        raise CompileError(
            f"compile: leaf {name}: expected a dense Tensor, got {type(tensor).__name__} of layout {tensor.layout}."
        )
    if tensor.is_complex():
        raise CompileError(
            f"compile: leaf {name}: complex tensors are not supported, got {short_dtype(tensor.dtype)}. "
            "Pass torch.view_as_real(z), and call view_as_complex inside."
        )
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    return LeafType(name, shape, tensor.dtype, tensor.device, stride, tensor.is_floating_point())


def dense_type(value: Tensor, name: str) -> LeafType:
    """The differentiable type of a dense tensor like a value: that of its tangents and cotangents."""
    dense = torch.empty_like(value)
    return LeafType(name, tuple(value.shape), value.dtype, value.device, tuple(dense.stride()), True)


def matcher(types: Sequence[LeafType]) -> Callable[[tuple[Any, ...]], bool]:
    """A fast check whether a flat tuple of tensors has these types: about 2 us for four.

    It may reject what `check_leaves` accepts, for example dynamic sizes; it never accepts what `check_leaves` rejects.
    """
    count = len(types)
    expected = [(torch.Size(leaf.shape), leaf.stride, leaf.dtype, leaf.device) for leaf in types]

    def check(leaves: tuple[Any, ...]) -> bool:
        if len(leaves) != count:
            return False
        try:
            for leaf, (shape, stride, dtype, device) in zip(leaves, expected):  # noqa: B905 (fast, and the lengths are equal)
                if leaf.shape != shape or leaf.dtype is not dtype or leaf.stride() != stride or leaf.device != device:
                    return False
                if leaf.is_neg():
                    return False
        except (AttributeError, TypeError, RuntimeError):  # not a tensor, or one without strides
            return False
        return True

    return check


def mismatch(leaf: LeafType, value: Any) -> str | None:
    """How a value differs from its type: "expected f32[4], got list"; None if it matches.

    The stride of a dim of size one does not matter.
    """
    if not isinstance(value, Tensor):
        return f"expected {leaf}, got {type(value).__name__}"
    if value.layout is not torch.strided:
        return f"expected dense {leaf}, got layout {value.layout}"
    dynamic = dict(leaf.dynamic)
    same_sizes = len(value.shape) == len(leaf.shape) and all(
        got == size for dim, (got, size) in enumerate(zip(value.shape, leaf.shape, strict=True)) if dim not in dynamic
    )
    if not same_sizes or value.dtype != leaf.dtype:
        return f"expected {leaf}, got {short_dtype(value.dtype)}{list(value.shape)}"
    if value.device != leaf.device:
        return f"expected device {leaf.device}, got {value.device}"
    expected = leaf.resized(value.shape).stride if leaf.dynamic else leaf.stride
    if value.numel() > 0 and any(
        got != step for got, step, size in zip(value.stride(), expected, value.shape, strict=True) if size > 1
    ):
        hint = ". Call .contiguous() on it" if expected == _contiguous(value.shape) else ""
        return f"expected stride {expected}, got {tuple(value.stride())}{hint}"
    if value.is_neg():  # torch negates such a view when it reads it; compiled code would not
        return "expected stored values, got a lazily negated view. Call .resolve_neg() on it"
    return None


def check_leaves(types: Sequence[LeafType], values: Sequence[Any], what: str, noun: str = "leaf") -> None:
    """Raise a LeafTypeError that names the first value that does not match its type."""
    if len(values) != len(types):
        plural = "leaves" if noun == "leaf" else f"{noun}s"
        raise LeafTypeError(f"{what}: expected {len(types)} {plural} ({_names(types)}), got {len(values)}.")
    for leaf, value in zip(types, values, strict=True):
        difference = mismatch(leaf, value)
        if difference is not None:
            name = leaf.name if noun == "cotangent" else f"{noun} {leaf.name}"
            raise LeafTypeError(f"{what}: {name}: {difference}.")


@dataclass(frozen=True)
class TangentSpec:
    """The tangents of all leaves, or the cotangents of all outputs.

    Args:
        noun: "tangent" or "cotangent", for messages.
        types: the type of each, without those of values that are not differentiable.
        differentiable: which of the leaves or outputs are differentiable.
        structure: the structure of the arguments or results; None if they are flat.
        matches: the fast check of `types`.
    """

    function: str
    noun: str
    types: tuple[LeafType, ...]
    differentiable: tuple[bool, ...]
    structure: PytreeSpec | None
    matches: Callable[[tuple[Any, ...]], bool]

    def flatten(self, given: Any) -> tuple[Any, ...]:
        """What the code takes, from one tensor, a flat tuple, or a pytree of the structure."""
        flat = given if type(given) is tuple else (given,)
        return flat if self.matches(flat) else self._flatten_slowly(given)

    def _flatten_slowly(self, given: Any) -> tuple[Any, ...]:
        what, count = f"{self.function}: {self.noun}", len(self.differentiable)
        if (
            isinstance(given, (tuple, list))
            and len(given) == count
            and all(isinstance(one, Tensor | None) for one in given)
        ):
            values = list(given)
        elif count == 1 and isinstance(given, (Tensor, int, float)):
            values = [given]
        elif self.structure is None:
            raise LeafTypeError(f"{what}: expected a tuple of {count} tensors, got {type(given).__name__}.")
        else:
            values = self.structure.flatten(given, what)
        values = [
            value for value, is_own in zip(values, self.differentiable, strict=True) if is_own or value is not None
        ]
        if len(values) != len(self.types):
            raise LeafTypeError(
                f"{what}: expected {len(self.types)} tensors, got {len(values)}. "
                "Pass None for values that are not differentiable."
            )
        values = [_with_strides(value, leaf) for value, leaf in zip(values, self.types, strict=True)]
        check_leaves(self.types, values, self.function, self.noun)
        return tuple(values)


def _with_strides(value: Any, leaf: LeafType) -> Any:
    """A tangent or cotangent with the strides that the code was compiled for. Copying is safe: nothing writes to it."""
    if isinstance(value, (int, float)) and leaf.shape == ():
        return torch.full((), value, dtype=leaf.dtype, device=leaf.device)
    if isinstance(value, Tensor) and value.shape == leaf.shape and (value.stride() != leaf.stride or value.is_neg()):
        strided = torch.empty_strided(leaf.shape, leaf.stride, dtype=value.dtype, device=value.device)
        return strided.copy_(value.detach())
    return value


def with_dynamic(types: Sequence[LeafType], dynamic: Mapping[Any, Any]) -> tuple[LeafType, ...]:
    """Leaf types with the dims that are declared dynamic: `{"x": 0}`, `{"x": [0, 1]}` or `{"x": {0: "batch"}}`."""
    declared = {_name_of(types, key): _named_dims(key, dims) for key, dims in dynamic.items()}
    return tuple(_with_dims(leaf, declared.get(leaf.name, {})) for leaf in types)


def _with_dims(leaf: LeafType, dims: Mapping[int, str]) -> LeafType:
    if not dims:
        return leaf
    nameless = [dim for dim, name in dims.items() if not isinstance(name, str) or not name]
    if nameless:
        raise CompileError(
            f"compile: dynamic: dim {nameless[0]} of {leaf.name}: expected a name such as 'batch', "
            f"got {dims[nameless[0]]!r}."
        )
    wrong = [dim for dim in dims if not 0 <= dim < len(leaf.shape)]
    if wrong:
        raise CompileError(f"compile: dynamic names dim {wrong[0]} of {leaf.name}, which has {len(leaf.shape)} dims.")
    if leaf.resized(leaf.shape).stride != leaf.stride and leaf.fake().numel() > 0:
        raise CompileError(
            f"compile: {leaf.name} has gaps in memory, so no dim of it can be dynamic. Pass {leaf.name}.contiguous()."
        )
    return replace(leaf, dynamic=tuple(sorted(dims.items())))


def with_sizes(leaf: LeafType, sizes: Mapping[str, Any]) -> LeafType:
    """A leaf type whose dynamic dims have these sizes: numbers or symbols."""
    if not leaf.dynamic:
        return leaf
    named = dict(leaf.dynamic)
    return leaf.resized([sizes[named[i]] if i in named else size for i, size in enumerate(leaf.shape)])


def dynamic_sizes(types: Sequence[LeafType], values: Sequence[Tensor]) -> dict[str, int]:
    """The size of each dynamic dim in a call, by its name. Raises if dims of one name differ."""
    sizes: dict[str, int] = {}
    for leaf, value in zip(types, values, strict=True):
        for dim, name in leaf.dynamic:
            if sizes.setdefault(name, value.shape[dim]) != value.shape[dim]:
                raise LeafTypeError(
                    f"leaf {leaf.name}: dim {dim} ({name}): expected {sizes[name]} as in the leaves before it, "
                    f"got {value.shape[dim]}."
                )
    return sizes


def _name_of(types: Sequence[LeafType], key: Any) -> str:
    names = [leaf.name for leaf in types]
    if isinstance(key, int) and 0 <= key < len(names):
        return names[key]
    if key not in names:
        raise CompileError(f"compile: there is no leaf {key!r}. The leaves are {_names(types)}.")
    return key


def select_leaves(types: Sequence[LeafType], names: Sequence[Any]) -> list[bool]:
    """For each leaf, whether it is named, by name or position."""
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
