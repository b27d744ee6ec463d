"""The annotation `Tensor[dtype, shape, device, requires_grad]`."""

from typing import TYPE_CHECKING, Any

import torch

from torchguard.exceptions import AnnotationError
from torchguard.typing._dims import AnySize, Attribute, Broadcasting, Dim, DimSpec, Exact, Named, OfSelf, RestSpec
from torchguard.typing._dtypes import TensorKind, dtype_of, is_dtype_name
from torchguard.typing._spec import TensorSpec

if TYPE_CHECKING:
    # To a static checker, `Tensor[float32_t, ("batch",)]` is a `torch.Tensor` with metadata, as `Annotated` has.
    from typing import Annotated as Tensor
else:

    class Tensor:
        """A tensor of a dtype and a shape; optionally on a device, and with or without `requires_grad`.

        A dim is a size, a name (which has one size throughout a call), `Dim.attribute`, `Broadcast`, or once `...`.

        >>> from torchguard.typing import Dim, Tensor, float32_t
        >>> Tensor[float32_t, ("batch", ..., Dim.hidden)]
        Tensor[float32_t, ('batch', ..., Dim.hidden)]
        """

        def __class_getitem__(cls, item: Any) -> Any:
            spec = _spec_of(item if isinstance(item, tuple) else (item,))
            return TensorKind("Tensor", spec.dtype, spec)

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AnnotationError("torchguard.typing.Tensor is for annotations. Make tensors with torch.")


Broadcast: Any = Broadcasting()
"""A dim that broadcasts against another tensor of the call."""


def _spec_of(parts: tuple[Any, ...]) -> TensorSpec:
    text = f"Tensor[{', '.join(_written(part) for part in parts)}]"
    if not 2 <= len(parts) <= 4:
        raise AnnotationError(f"{text}: give a dtype and a shape, then if you like a device and requires_grad.")
    dtype, shape, device, requires_grad = (*parts, None, None)[:4]
    try:
        return TensorSpec(text, dtype_of(dtype), _dims_of(shape), _device_of(device), _grad_of(requires_grad))
    except AnnotationError as error:
        raise error if str(error).startswith(text) else AnnotationError(f"{text}: {error}") from None


def _dims_of(shape: Any) -> tuple[DimSpec | RestSpec, ...]:
    if shape is ...:
        return (RestSpec(),)
    if not isinstance(shape, (tuple, list)):
        raise AnnotationError(f"the shape is {shape!r}. Give a tuple of dims, such as ('batch', 8), or (8,) for one.")
    return tuple(_dim_of(dim) for dim in shape)


def _dim_of(dim: Any) -> DimSpec | RestSpec:
    if dim is ...:
        return RestSpec()
    if isinstance(dim, Broadcasting):
        return dim
    if dim is Dim:
        raise AnnotationError("Dim alone is no size. Name the attribute: Dim.hidden.")
    if isinstance(dim, Attribute):
        return OfSelf(repr(dim), dim.__read__)
    if isinstance(dim, str):
        return AnySize() if dim == "_" else Named(_name_of(dim))
    if isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0:
        return Exact(dim)
    if isinstance(dim, (torch.dtype, TensorKind)):
        raise AnnotationError(f"{_written(dim)} is a dtype and stands where a dim belongs.")
    raise AnnotationError(f"{dim!r} is no dim. Use a size, a name, Dim.attribute, Broadcast or '...'.")


def _name_of(name: str) -> str:
    if is_dtype_name(name):
        raise AnnotationError(f"{name!r} names a dtype and stands where a dim belongs. Call the dim something else.")
    if not name.isidentifier():
        raise AnnotationError(f"{name!r} is no name for a dim: it must be one word, like a variable.")
    return name


def _device_of(device: Any) -> torch.device | None:
    if device is None or isinstance(device, torch.device):
        return device
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise AnnotationError(f"the device is {device!r}. Give 'cpu', 'cuda', 'cuda:0' or None for any.") from error


def _grad_of(requires_grad: Any) -> bool | None:
    if requires_grad not in (None, True, False):
        raise AnnotationError(f"requires_grad is {requires_grad!r}. Give True, False, or None for either.")
    return requires_grad


def _written(part: Any) -> str:
    """The source text of a part."""
    if part is ...:
        return "..."
    if isinstance(part, tuple):
        return f"({', '.join(_written(inner) for inner in part)}{',' * (len(part) == 1)})"
    return repr(part)
