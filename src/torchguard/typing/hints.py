"""Annotations as objects, also where they were written as text."""

import re
import sys
import typing
from collections.abc import Mapping
from typing import Any

from torchguard.exceptions import AnnotationError

# `Tensor[float32_t, ...]`, `Float[Tensor, ...]`, `x.Int64[torch.Tensor, ...]`, `bool_t`.
_DECLARES_A_TENSOR = re.compile(r"\bTensor\s*\[|\[\s*(torch\.)?Tensor\s*,|\b\w+\d*_t\b")


class Unresolved:
    """Text that names something which is not there (yet)."""

    def __init__(self, text: str, reason: str) -> None:
        self.text, self.reason = text, reason

    @property
    def declares_a_tensor(self) -> bool:
        return _DECLARES_A_TENSOR.search(self.text) is not None

    def __str__(self) -> str:
        return (
            f"{self.text!r} cannot be looked up: {self.reason}. "
            "Is it spelt right, and imported when the program runs, not only under TYPE_CHECKING?"
        )


def resolve(annotation: Any, names: Mapping[str, Any], local: Mapping[str, Any]) -> Any:
    """The annotation with all text in it evaluated, or an `Unresolved`."""

    def holder() -> None: ...

    holder.__annotations__ = {"it": annotation}
    try:
        return typing.get_type_hints(holder, dict(names), dict(local), include_extras=True)["it"]
    except AnnotationError:
        raise
    except Exception as error:  # whatever evaluating the user's text comes to
        return Unresolved(annotation if isinstance(annotation, str) else str(annotation), str(error))


def fields_of(kind: type) -> dict[str, Any]:
    """The annotated fields of a class, those of its bases first. What cannot be looked up is left out."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        names = vars(sys.modules.get(base.__module__, typing))
        for name, annotation in vars(base).get("__annotations__", {}).items():
            hint = resolve(annotation, names, vars(base))
            if isinstance(hint, Unresolved) and hint.declares_a_tensor:
                raise AnnotationError(f"{kind.__qualname__}.{name}: {hint}")
            found[name] = None if isinstance(hint, Unresolved) else hint
    return found
