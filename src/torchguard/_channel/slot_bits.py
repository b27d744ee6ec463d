"""Bit layout of the 16-bit slot: location in bits 15-6, code in bits 5-2, severity in bits 1-0."""

from typing import Final, TypeVar

from torch import Tensor

SLOT_BITS: Final = 16
SLOTS_PER_WORD: Final = 4
SLOT_MASK: Final = 0xFFFF

SEVERITY_SHIFT: Final = 0
SEVERITY_BITS: Final = 2
SEVERITY_MASK: Final = 0x3

CODE_SHIFT: Final = 2
CODE_BITS: Final = 4
CODE_MASK: Final = 0xF

LOCATION_SHIFT: Final = 6
LOCATION_BITS: Final = 10
LOCATION_MASK: Final = 0x3FF

Bits = TypeVar("Bits", int, Tensor)


def pack_slot(code: Bits, location: Bits, severity: Bits) -> Bits:
    """Put the three fields into one slot.

    >>> hex(pack_slot(code=1, location=42, severity=3))
    '0xa87'
    """
    return (location << LOCATION_SHIFT) | (code << CODE_SHIFT) | (severity << SEVERITY_SHIFT)


def slot_code(slot: Bits) -> Bits:
    return (slot >> CODE_SHIFT) & CODE_MASK


def slot_location(slot: Bits) -> Bits:
    return (slot >> LOCATION_SHIFT) & LOCATION_MASK


def slot_severity(slot: Bits) -> Bits:
    return (slot >> SEVERITY_SHIFT) & SEVERITY_MASK
