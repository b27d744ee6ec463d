"""Error codes, their domains and severities.

They are plain integers rather than enums because graphs hold them as constants and slots hold them as bits.
"""

import contextlib
from collections.abc import Iterator
from typing import Final

from torchguard._renamed import renamed


class Severity:
    """How bad a recorded error is, from 0 to 3."""

    OK: Final = 0
    WARN: Final = 1
    ERROR: Final = 2
    CRITICAL: Final = 3

    @staticmethod
    @renamed(sev="severity")
    def name(severity: int) -> str:
        """
        >>> Severity.name(3)
        'CRITICAL'
        """
        return _SEVERITY_NAMES.get(severity, f"SEVERITY_{severity}")

    @staticmethod
    @renamed(sev="severity")
    def is_critical(severity: int) -> bool:
        return severity == Severity.CRITICAL

    @staticmethod
    @renamed(sev="severity")
    def is_error_or_worse(severity: int) -> bool:
        return severity >= Severity.ERROR

    @staticmethod
    @renamed(sev="severity")
    def is_warn_or_worse(severity: int) -> bool:
        return severity >= Severity.WARN


class ErrorDomain:
    """The upper two bits of a code: the kind of error."""

    NUMERIC: Final = 0
    INDEX: Final = 1
    QUALITY: Final = 2
    RUNTIME: Final = 3

    @staticmethod
    @renamed(domain_bits="domain")
    def name(domain: int) -> str:
        """
        >>> ErrorDomain.name(ErrorDomain.INDEX)
        'INDEX'
        """
        return _DOMAIN_NAMES.get(domain, f"DOMAIN_{domain}")


class ErrorCode:
    """What went wrong, in four bits: domain (2), then number within the domain (2).

    Codes 4, 8 and 12 are free for your own errors; they are printed as `CODE_4` and so on.
    """

    OK: Final = 0
    NAN: Final = 1
    INF: Final = 2
    OVERFLOW: Final = 3
    OUT_OF_BOUNDS: Final = 5
    OOB: Final = 5
    NEGATIVE_IDX: Final = 6
    EMPTY_INPUT: Final = 7
    ZERO_OUTPUT: Final = 9
    CONSTANT_OUTPUT: Final = 10
    SATURATED: Final = 11
    FALLBACK_VALUE: Final = 13
    VALUE_CLAMPED: Final = 14
    UNKNOWN: Final = 15

    # Second names in 1.x. Errors are printed under the first name.
    UNDERFLOW: Final = 3
    INVALID_VALUE: Final = 6
    SPARSE: Final = 9
    UNSTABLE: Final = 11
    CLAMPED: Final = 14

    @staticmethod
    def name(code: int) -> str:
        """
        >>> ErrorCode.name(ErrorCode.OOB)
        'OUT_OF_BOUNDS'
        """
        return _CODE_NAMES.get(code, f"CODE_{code}")

    @staticmethod
    def domain(code: int) -> int:
        return code >> 2

    @staticmethod
    def subcode(code: int) -> int:
        return code & 0x3

    @staticmethod
    def in_domain(code: int, domain: int) -> bool:
        return ErrorCode.domain(code) == domain

    @staticmethod
    def domain_name(code: int) -> str:
        return ErrorDomain.name(ErrorCode.domain(code))

    @staticmethod
    def is_critical(code: int) -> bool:
        return ErrorCode.default_severity(code) == Severity.CRITICAL

    @staticmethod
    def default_severity(code: int) -> int:
        """The severity a push of `code` gets when none is given.

        >>> ErrorCode.default_severity(ErrorCode.NAN) == Severity.CRITICAL
        True
        """
        return DEFAULT_SEVERITY.get(code, Severity.ERROR)


_SEVERITY_NAMES = {0: "OK", 1: "WARN", 2: "ERROR", 3: "CRITICAL"}
_DOMAIN_NAMES = {0: "NUMERIC", 1: "INDEX", 2: "QUALITY", 3: "RUNTIME"}
_CODE_NAMES = {  # reversed, so that the first of several names wins
    value: name for name, value in reversed([*vars(ErrorCode).items()]) if name.isupper() and isinstance(value, int)
}

FREE_CODES: Final = (4, 8, 12)

# Codes without an entry use `ErrorConfig.default_severity`.
DEFAULT_SEVERITY: Final[dict[int, int]] = {
    ErrorCode.OK: Severity.OK,
    ErrorCode.NAN: Severity.CRITICAL,
    ErrorCode.INF: Severity.CRITICAL,
    ErrorCode.OVERFLOW: Severity.ERROR,
    ErrorCode.OUT_OF_BOUNDS: Severity.ERROR,
    ErrorCode.NEGATIVE_IDX: Severity.ERROR,
    ErrorCode.EMPTY_INPUT: Severity.ERROR,
    ErrorCode.ZERO_OUTPUT: Severity.WARN,
    ErrorCode.CONSTANT_OUTPUT: Severity.WARN,
    ErrorCode.SATURATED: Severity.WARN,
    ErrorCode.FALLBACK_VALUE: Severity.WARN,
    ErrorCode.VALUE_CLAMPED: Severity.WARN,
}


def code_named(name: str) -> int | None:
    """Return the code with that name; a new name takes one of the free codes for the lifetime of the process.

    Returns None if all free codes have other names.
    """
    named = {_CODE_NAMES.get(code): code for code in reversed(FREE_CODES)}
    code = named.get(name, named.get(None))
    if code is not None:
        _CODE_NAMES[code] = name
    return code


@contextlib.contextmanager
def scoped_names() -> Iterator[None]:
    """Restore the names of codes at the end of a block."""
    before = dict(_CODE_NAMES)
    try:
        yield
    finally:
        _CODE_NAMES.clear()
        _CODE_NAMES.update(before)
