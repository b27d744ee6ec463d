"""`TensorSpec`: the requirements on one declared tensor."""

from typing import Any

import torch

from torchguard.exceptions import AnnotationError, DeviceMismatchError, DTypeMismatchError
from torchguard.typing._dims import DimSpec, OneOr, RestSpec
from torchguard.typing._dtypes import ERROR, DType
from torchguard.typing._scope import CheckedTensor, Scope, described


class TensorSpec:
    """A declared tensor: its `head` dims, any number in between if there is a `rest`, then its `tail` dims.

    `dtype`, `device` and `requires_grad` are None where any value is accepted.
    """

    def __init__(
        self,
        text: str,
        dtype: DType | None,
        dims: tuple[DimSpec | RestSpec, ...] = (RestSpec(),),
        device: torch.device | None = None,
        requires_grad: bool | None = None,
    ) -> None:
        rests = [i for i, dim in enumerate(dims) if isinstance(dim, RestSpec)]
        if len(rests) > 1:
            raise AnnotationError(f"{text} has {len(rests)} ellipses. One is all a shape can have.")
        split = rests[0] if rests else len(dims)
        if dtype is ERROR and not rests and len(dims) != 2:
            raise AnnotationError(f"{text}: flags have two dims, samples and words.")
        if requires_grad and dtype and not any(d.is_floating_point or d.is_complex for d in dtype.members):
            raise AnnotationError(f"{text}: only floats and complex numbers can require a gradient.")
        self.text, self.dtype, self.device, self.requires_grad = text, dtype, device, requires_grad
        self.dims = dims
        self.head: tuple[Any, ...] = dims[:split]
        self.rest: Any = dims[split] if rests else None
        self.tail: tuple[Any, ...] = dims[split + 1 :]
        self.is_deferred = any(dim.deferred for dim in self.head + self.tail)

    @property
    def plain_dims(self) -> list[DimSpec]:
        """Its dims, without the rest and without jaxtyping's `#`."""
        return [dim.dim if isinstance(dim, OneOr) else dim for dim in self.head + self.tail]

    @property
    def is_flags(self) -> bool:
        return self.dtype is ERROR

    def __repr__(self) -> str:
        return self.text

    def check(self, value: Any, scope: Scope, path: str) -> None:
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, torch.fx.Proxy):  # torch.fx traces symbolically: the value has no properties
                scope.report_kind(path, "", self.text, described(value), "Give a torch.Tensor.")
            return
        shape = value.shape
        scope.checked.append((self, path, shape))
        if self.dtype is not None and value.dtype not in self.dtype.members:
            advice = _casting(value.dtype, self.dtype)
            scope.report(DTypeMismatchError, path, self.text, self.dtype.name, str(value.dtype), advice)
        try:
            if not self._accepts(shape, scope):
                scope.report_shape(len(scope.checked) - 1)
        except AnnotationError as error:
            raise AnnotationError(f"{scope.function}: {path}: {self.text}: {error}") from error
        if self.device is not None and not self._is_on_device(value.device):
            there, here = str(self.device), str(value.device)
            advice = None if "meta" in (there, here) else f".to({there!r}) would match."
            scope.report(DeviceMismatchError, path, self.text, there, here, advice)
        if self.requires_grad is not None and value.requires_grad != self.requires_grad:
            self._report_grad(value.requires_grad, scope, path)

    def _report_grad(self, found: bool, scope: Scope, path: str) -> None:
        # Without grad mode, no computed tensor requires a gradient.
        if not scope.returning or torch.is_grad_enabled():
            declared, have = f"requires_grad={self.requires_grad}", f"requires_grad={found}"
            advice = f"{'.requires_grad_()' if self.requires_grad else '.detach()'} would match."
            scope.report_kind(path, self.text, declared, have, advice)

    def _accepts(self, shape: tuple[int, ...], scope: Scope) -> bool:
        """Whether the shape is accepted, as far as the tensors so far decide. Only an accepted shape binds names."""
        if not self.has_rank_of(shape):
            return False
        known = len(scope.sizes)
        fits = all(dim.accepts(size, scope) for dim, size in zip(self.head, shape, strict=False))
        if self.rest is not None and fits:
            split = len(shape) - len(self.tail)
            fits = all(dim.accepts(size, scope) for dim, size in zip(self.tail, shape[split:], strict=True))
            fits = fits and self.rest.accepts(tuple(shape[len(self.head) : split]), scope)
        while not fits and len(scope.sizes) > known:
            scope.sizes.popitem()  # the one bound last
        return fits

    def has_rank_of(self, shape: tuple[int, ...]) -> bool:
        least = len(self.head) + len(self.tail)
        return len(shape) == least if self.rest is None else len(shape) >= least

    def _is_on_device(self, device: torch.device) -> bool:
        assert self.device is not None
        return device.type == self.device.type and self.device.index in (None, device.index)

    def dims_with_positions(self, shape: tuple[int, ...]) -> list[tuple[int, Any]]:
        """The dims of head and tail with their positions in a shape of matching rank."""
        split = len(shape) - len(self.tail)
        return [*enumerate(self.head), *zip(range(split, len(shape)), self.tail, strict=True)]

    def mismatches(self, checked: CheckedTensor, scope: Scope) -> list[int]:
        """The positions of dims that reject their size, all tensors being known. Binds names that are not bound yet."""
        shape = checked[2]
        wrong = [
            i
            for i, dim in self.dims_with_positions(shape)
            if not (dim.accepts(shape[i], scope) and dim.accepts_finally(shape[i], scope, checked, len(shape) - i))
        ]
        middle = range(len(self.head), len(shape) - len(self.tail))
        if self.rest is not None and not self.rest.accepts(tuple(shape[i] for i in middle), scope):
            wrong += middle
        return wrong


def _casting(found: torch.dtype, declared: DType) -> str | None:
    """The cast that satisfies the declaration, unless it changes the kind of number."""
    members = list(declared.members)
    is_same_kind = len(members) == 1 and torch.can_cast(found, members[0])
    return f".to({members[0]}) would match." if is_same_kind else None
