"""The pair `(out, f)` that a watched model returns.

Callers that know nothing of `watch` (a training loop, `generate`, a pipeline) expect the model's own output. They fail
at the pair with errors such as "cross_entropy_loss(): argument 'input' must be Tensor, not tuple", which do not say
what to do. So in eager mode the pair is a tuple that names the remedy when it is used as an output. In a graph, and
under transforms, it is a plain tuple.
"""

from typing import Any

from torch import Tensor

from torchguard._torch.tensors import register_tuple
from torchguard._torch.tracing import is_plain
from torchguard.exceptions import ReturnsError

# What a tensor can do and a tuple cannot, or does in another way: a tuple times 2 is twice as long.
_OPERATIONS = ("neg", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "matmul", "rmatmul", "float")


class WatchedOutput(tuple):
    """`(out, f)`, which unpacks, indexes and compares as a tuple does. To use it as `out` is an error."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise _error(f"it has no attribute {name!r}")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, (int, slice)):
            return tuple.__getitem__(self, key)
        raise _error(f"it has no item {key!r}")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _error(f"{getattr(function, '__name__', function)} does not take it")


def _refusing(name: str) -> Any:
    def refuse(self: WatchedOutput, *_: Any) -> Any:
        raise _error(f"it has no {name}")

    return refuse


for _name in _OPERATIONS:
    setattr(WatchedOutput, f"__{_name}__", _refusing(f"__{_name}__"))
register_tuple(WatchedOutput)


def _error(what: str) -> ReturnsError:
    return ReturnsError(
        f"watch: the watched model returned the tuple (out, f), and {what}. Unpack it, `out, f = guarded(...)`. For "
        "callers that expect the model's own output: watch(model, returns='output'), with the flags in guarded.flags."
    )


def returned(output: Any, flags: Tensor) -> tuple[Any, Tensor]:
    """The pair that a call returns."""
    return WatchedOutput((output, flags)) if is_plain(flags) else (output, flags)
