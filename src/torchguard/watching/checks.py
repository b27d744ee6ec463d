"""What is looked for in what a module returns, beside NaN and Inf."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchguard.errors.codes import FREE_CODES, ErrorCode, code_named
from torchguard.exceptions import WatchError

DEFAULT = ("nan", "inf", "indices")


class Check(NamedTuple):
    """A look at a sample's values: `(batch, values)` to `(batch,)`, True for a sample to be recorded."""

    code: int
    look: Callable[..., Any]
    message: str = ""


class Checks(NamedTuple):
    """What is looked for. NaN and Inf are looked for together; `others` take a look of their own each."""

    nan: bool
    inf: bool
    indices: bool
    others: tuple[Check, ...]


def checks_of(asked: Iterable[Any]) -> Checks:
    """What `checks=` asks for: names, `("overflow", 0.9)`, or `(name, function, message)` for one of your own."""
    names, others = set(), []
    for check in asked:
        match check:
            case "nan" | "inf" | "indices":
                names.add(check)
            case "overflow":
                others.append(_near_overflow(0.9))
            case ("overflow", float() | int() as share) if 0 < share <= 1:
                others.append(_near_overflow(share))
            case str() if check in _QUALITY:
                others.append(_QUALITY[check])
            case (str() as name, look) if name and callable(look):
                others.append(Check(_own_code(name), look))
            case (str() as name, look, str() as message) if name and callable(look):
                others.append(Check(_own_code(name), look, message))
            case _:
                known = ", ".join((*DEFAULT, "overflow", *_QUALITY))
                raise WatchError(
                    f"watch: checks has {check!r}. Give one of {known}, ('overflow', share of the largest number), or "
                    "(name, function) and, if you like, a message."
                )
    return Checks("nan" in names, "inf" in names, "indices" in names, tuple(others))


def _own_code(name: str) -> int:
    code = code_named(name.upper())
    if code is None:
        taken = ", ".join(ErrorCode.name(code) for code in FREE_CODES)
        raise WatchError(f"watch: no code is left for {name!r}. There are three, for all models: {taken} have them.")
    return code


def _near_overflow(share: float) -> Check:
    def look(values: Tensor) -> Tensor:
        largest = values.abs().amax(-1)
        return (largest >= share * torch.finfo(values.dtype).max) & largest.isfinite()

    return Check(ErrorCode.OVERFLOW, look)


def _zero(values: Tensor) -> Tensor:
    return values.abs().amax(-1) == 0


def _constant(values: Tensor) -> Tensor:
    return values.amax(-1) == values.amin(-1)


def _saturated(values: Tensor) -> Tensor:
    """Every value has the magnitude of the largest, to a hundredth: what a saturated tanh or sigmoid returns."""
    magnitude = values.abs()
    largest = magnitude.amax(-1)
    return (magnitude.amin(-1) >= 0.99 * largest) & (largest > 0) & largest.isfinite()


_QUALITY = {
    "zero": Check(ErrorCode.ZERO_OUTPUT, _zero),
    "constant": Check(ErrorCode.CONSTANT_OUTPUT, _constant),
    "saturated": Check(ErrorCode.SATURATED, _saturated),
}
