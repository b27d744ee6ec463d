"""Resolution of annotations, including those written as strings."""

import re
import sys
import typing
from collections.abc import Mapping
from types import FrameType, FunctionType
from typing import Any

from torchguard.exceptions import AnnotationError

# `Tensor[float32_t, ...]`, `Float[Tensor, "batch"]`, `bool_t`.
_DECLARES_A_TENSOR = re.compile(
    r"\bTensor\s*\[|\[\s*(torch\.)?Tensor\s*,\s*[\"']|\b(b?float|u?int|bool|complex|error|qu?int)\w*_t\b"
)


class Unresolved:
    """A string annotation that names something undefined, at least so far."""

    def __init__(self, text: str, reason: str) -> None:
        self.text, self.reason = text, reason

    @property
    def declares_a_tensor(self) -> bool:
        return _DECLARES_A_TENSOR.search(self.text) is not None

    def __str__(self) -> str:
        return (
            f"{self.text!r} cannot be resolved: {self.reason}. "
            "Is it spelt right, and imported when the program runs, not only under TYPE_CHECKING?"
        )


def resolve(annotation: Any, names: Mapping[str, Any], local: Mapping[str, Any]) -> Any:
    """The annotation with all strings in it evaluated, or an `Unresolved`."""

    def holder() -> None: ...

    holder.__annotations__ = {"it": annotation}
    try:
        return typing.get_type_hints(holder, dict(names), dict(local), include_extras=True)["it"]
    except AnnotationError:
        raise
    except Exception as error:  # evaluating the user's string can raise anything
        return Unresolved(annotation if isinstance(annotation, str) else str(annotation), str(error))


def fields_of(kind: type, local: Mapping[str, Any]) -> dict[str, Any]:
    """The annotated fields of a class, those of its bases first; None for those that cannot be resolved."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        names = vars(sys.modules.get(base.__module__, typing))
        for name, annotation in vars(base).get("__annotations__", {}).items():
            hint = resolve(annotation, names, {**local, **vars(base), **_type_parameters(base)})
            if isinstance(hint, Unresolved) and hint.declares_a_tensor:
                raise AnnotationError(f"{kind.__qualname__}.{name}: {hint}")
            found[name] = None if isinstance(hint, Unresolved) else hint
    return found


def names_around(function: FunctionType, frame: FrameType | None) -> dict[str, Any]:
    """The names of enclosing scopes that string annotations use.

    Only these: holding whole scopes would keep objects alive that they have already released.
    """
    found = _type_parameters(function)
    texts = [
        str(hint) for hint in function.__annotations__.values() if isinstance(hint, str) or "ForwardRef(" in str(hint)
    ]
    used = set(re.findall(r"\w+", " ".join(texts)))
    enclosing = function.__qualname__.split(".")[:-1]
    while used and frame is not None and enclosing:
        if enclosing[-1] == "<locals>":
            enclosing.pop()
        if frame.f_code.co_qualname != ".".join(enclosing):
            break
        found = {name: value for name, value in frame.f_locals.items() if name in used} | found
        if "__qualname__" not in frame.f_locals:  # a function: its caller is not an enclosing scope
            break
        frame, enclosing = frame.f_back, enclosing[:-1]
    return found


def _type_parameters(owner: Any) -> dict[str, Any]:
    """The `T` of `def f[T](...)`."""
    return {parameter.__name__: parameter for parameter in getattr(owner, "__type_params__", ())}
