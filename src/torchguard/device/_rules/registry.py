"""The rules that every device is checked with."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeVar

from torchguard.device._rules import dtype, layout, memory, ops, shape
from torchguard.device._rules.base import Constraint
from torchguard.exceptions import DeviceError

if TYPE_CHECKING:
    from torchguard.device._device import Device

R = TypeVar("R", bound="Constraint | type[Constraint]")

_rules: dict[str, Constraint] = {
    rule.code: rule for module in (dtype, layout, shape, memory, ops) for rule in module.RULES
}


def register(rule: R) -> R:
    """Check every device with this rule from now on. Also a decorator of the rule's class."""
    made = rule() if isinstance(rule, type) else rule
    if not isinstance(made, Constraint) or not getattr(made, "code", ""):
        raise DeviceError(
            f"register: expected a Constraint with a code, got {rule!r}. Derive it from Constraint and set code."
        )
    if conflict := code_conflict([made]):
        raise DeviceError(f"register: {conflict}")
    _rules[made.code] = made
    return rule


def unregister(code: str) -> None:
    """Remove a rule."""
    if code not in _rules:
        raise DeviceError(f"unregister: there is no rule {code!r}. Use one of {', '.join(_rules)}.")
    del _rules[code]


def rules_of(device: "Device") -> Iterable[Constraint]:
    """The registered rules, then the device's own."""
    if conflict := code_conflict(device.constraints):  # with a rule that was registered after the device was made
        raise DeviceError(f"Device.constraints of {device.name}: {conflict}")
    return [*_rules.values(), *device.constraints]


def code_conflict(rules: Iterable[Constraint]) -> str | None:
    """A sentence about the first of these rules whose code a registered rule or an earlier one has. None if none."""
    taken = dict(_rules)
    for rule in rules:
        if rule.code in taken:
            return f"The code {rule.code} is taken by {type(taken[rule.code]).__name__}. Choose another code."
        taken[rule.code] = rule
    return None
