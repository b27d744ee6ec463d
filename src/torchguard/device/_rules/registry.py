"""The rules every device is checked with."""

from collections.abc import Iterable
from typing import TypeVar

from torchguard.device._device import Device
from torchguard.device._rules import dtype, layout, memory, ops, shape
from torchguard.device._rules.base import Constraint
from torchguard.device._taken_codes import TAKEN, first_taken
from torchguard.exceptions import DeviceError

R = TypeVar("R", bound="Constraint | type[Constraint]")

_rules: dict[str, Constraint] = {
    rule.code: rule for module in (dtype, layout, shape, memory, ops) for rule in module.RULES
}


TAKEN.update({code: type(rule).__name__ for code, rule in _rules.items()})


def register(rule: R) -> R:
    """Check every device with a rule of yours, from now on; also as a decorator of its class."""
    made = rule() if isinstance(rule, type) else rule
    if not isinstance(made, Constraint) or not getattr(made, "code", ""):
        raise DeviceError(f"register: {rule!r} is no Constraint with a code. Derive it from Constraint and set code.")
    if made.code in _rules:
        raise DeviceError(f"register: {made.code} is taken by {type(_rules[made.code]).__name__}. Choose another code.")
    _rules[made.code] = made
    TAKEN[made.code] = type(made).__name__
    return rule


def unregister(code: str) -> None:
    """Take a rule out again."""
    if code not in _rules:
        raise DeviceError(f"unregister: there is no rule {code!r}. There are {', '.join(_rules)}.")
    del _rules[code], TAKEN[code]


def rules_of(device: Device) -> Iterable[Constraint]:
    """Those that are registered, then the device's own."""
    if (code := first_taken([rule.code for rule in device.constraints])) is not None:  # registered since it was made
        raise DeviceError(f"Device.constraints of {device.name}: {code} is taken. Choose another code.")
    return [*_rules.values(), *device.constraints]
