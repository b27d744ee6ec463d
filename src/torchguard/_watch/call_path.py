"""The path of a call: a hash of all operations so far, by which two calls are compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._torch.dispatch import DispatchMode, is_composite, is_higher_order, is_query

_HASHED = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class PathMode(DispatchMode):
    """Identifies the way that a call takes through a model: `path` is a hash of all operations so far.

    It has the order of operations, the shapes of their tensors and all other arguments, but no casts of parameters.
    """

    supports_higher_order_operators = True  # such as that of `torch.cond`

    def __init__(self) -> None:
        super().__init__()
        self.path = 0
        self.is_paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have Dynamo compile all the same. It would never compile again what it meets under another mode."""
        return True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations in it do not count."""
        self.is_paused, before = True, self.is_paused
        try:
            yield
        finally:
            self.is_paused = before

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_higher_order(op):
            return self._follow_whole(op, op(*args, **kwargs))
        if self.is_paused or is_query(op):
            return self._ignore(op(*args, **kwargs))
        if is_composite(op) and not any(_is_nested(one) for one in args):  # in inference mode, they arrive whole
            with self:
                return op.decompose(*args, **kwargs)
        result = op(*args, **kwargs)
        if not _casts_parameter(op, args):
            self.path = hash((self.path, op, _outline(args), _outline([*kwargs.items()])))
        self._follow(op, args, kwargs, result)
        return result

    def _follow(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Do more with an operation."""

    def _follow_whole(self, op: Any, result: Any) -> Any:
        """The result of an operator that calls functions, whose operations are not seen."""
        self.path = hash((self.path, str(op)))
        return result

    def _ignore(self, result: Any) -> Any:
        """The result of an operation that does not count."""
        return result


def _casts_parameter(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operation casts a parameter to another dtype. Autocast does so in the first call alone, and keeps it
    for the next."""
    return op is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter)


def _outline(value: Any) -> Any:
    """A value that can be hashed: of tensors the shape, of what cannot be hashed the type."""
    if isinstance(value, Tensor):
        return value.shape if value.layout == torch.strided and not value.is_nested else type(value)
    if isinstance(value, (list, tuple)):
        return tuple([_outline(one) for one in value])
    return value if isinstance(value, _HASHED) or value is None else type(value)


def _is_nested(value: Any) -> bool:
    """Whether a value is a nested tensor: it may have operations of its own for what others are composed of."""
    return isinstance(value, Tensor) and value.is_nested
