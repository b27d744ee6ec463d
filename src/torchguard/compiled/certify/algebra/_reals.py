"""The same operations on real numbers, in float64: which way a comparison goes is decided here."""

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._field import Field, UnsupportedError

_FUNCTIONS = {
    name: getattr(torch, name)
    for name in ("exp", "log", "sqrt", "erf", "asin", "acos", "atan", "asinh", "acosh", "atanh", "lgamma", "erfinv")
    + ("digamma", "atan2", "logaddexp", "pow")
} | {"tan_half": lambda x: torch.tan(x / 2)}


@dataclass(frozen=True)
class Reals(Field):
    """Real numbers, under the names a field has for what can be done with its elements. Rounding is of no concern."""

    dtype: ClassVar[torch.dtype] = torch.float64

    def reduced(self, a: Tensor) -> Tensor:
        return a

    def number(self, c: float | Fraction) -> float:  # type: ignore[override]
        return float(c)

    def tensor(self, values: Tensor) -> Tensor:
        return values.to(torch.float64)

    def random(self, name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
        return torch.ones(tuple(shape), dtype=torch.float64)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def power(self, a: Tensor, n: int) -> Tensor:
        return a.to(torch.float64) ** n

    def inverse(self, a: Tensor) -> Tensor:
        return 1 / a

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def total(self, a: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
        return a.sum(dims, keepdim=keepdim) if dims else a

    def unknown_function(self, name: str, *arguments: Tensor) -> Tensor:
        if name.startswith("pow "):
            return arguments[0] ** float(Fraction(name.removeprefix("pow ")))
        if name not in _FUNCTIONS:
            raise UnsupportedError(name)
        return _FUNCTIONS[name](*arguments)

    def folded(self, a: Tensor) -> tuple[Tensor, Tensor]:
        return a.abs(), a < 0

    def sizes(self, a: Tensor) -> Tensor:
        self.journal.sizes[self.journal.next_place()] = a
        return a
