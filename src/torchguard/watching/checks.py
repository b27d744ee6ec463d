"""What is looked for in what a module returns, beside NaN and Inf."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from torchguard.errors.codes import ErrorCode, name_code
from torchguard.exceptions import WatchError

DEFAULT = ("nan", "inf", "indices")
_FREE_CODES = (4, 8, 12)


class Check(NamedTuple):
    """A look at a sample's values: `(batch, values)` to `(batch,)`, True for a sample to be recorded."""

    code: int
    look: Callable[[Tensor], Tensor]


class Checks(NamedTuple):
    """What is looked for. NaN and Inf are looked for together; `others` take a look of their own each."""

    nan: bool
    inf: bool
    indices: bool
    others: tuple[Check, ...]


def checks_of(asked: Iterable[Any]) -> Checks:
    """What `checks=` asks for: names, `("overflow", 0.9)`, or `(name, function)` for one of your own."""
    names, others = set(), []
    for check in asked:
        name, setting = cast("tuple[Any, Any]", check if isinstance(check, tuple) else (check, None))
        if callable(setting):
            others.append(Check(_own_code(name, others), cast("Callable[[Tensor], Tensor]", setting)))
        elif name in DEFAULT and setting is None:
            names.add(name)
        elif name == "overflow":
            others.append(Check(ErrorCode.OVERFLOW, _near_overflow(0.9 if setting is None else setting)))
        elif name in _QUALITY and setting is None:
            others.append(Check(*_QUALITY[name]))
        else:
            known = ", ".join((*DEFAULT, "overflow", *_QUALITY))
            raise WatchError(
                f"watch: checks has {check!r}. Give one of {known}, ('overflow', share) or (name, function)."
            )
    return Checks("nan" in names, "inf" in names, "indices" in names, tuple(others))


def _own_code(name: Any, others: list[Check]) -> int:
    taken = {check.code for check in others}
    free = [code for code in _FREE_CODES if code not in taken]
    if not isinstance(name, str) or not name or not free:
        raise WatchError(f"watch: {name!r} cannot be a check. There is room for three of your own, each with a name.")
    name_code(free[0], name.upper())
    return free[0]


def _near_overflow(share: float) -> Callable[[Tensor], Tensor]:
    if not 0 < share <= 1:
        raise WatchError(f"watch: overflow at {share!r} of the largest number. Give a share, such as 0.9.")

    def look(values: Tensor) -> Tensor:
        largest = values.abs().amax(-1)
        return (largest >= share * torch.finfo(values.dtype).max) & largest.isfinite()

    return look


def _zero(values: Tensor) -> Tensor:
    return values.abs().amax(-1) == 0


def _constant(values: Tensor) -> Tensor:
    return values.amax(-1) == values.amin(-1)


def _saturated(values: Tensor) -> Tensor:
    """Every value has the magnitude of the largest, to a hundredth: what a saturated tanh or sigmoid returns."""
    magnitude = values.abs()
    largest = magnitude.amax(-1)
    return (magnitude.amin(-1) >= 0.99 * largest) & (largest > 0) & largest.isfinite()


_QUALITY: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "zero": (ErrorCode.ZERO_OUTPUT, _zero),
    "constant": (ErrorCode.CONSTANT_OUTPUT, _constant),
    "saturated": (ErrorCode.SATURATED, _saturated),
}
