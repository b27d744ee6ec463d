"""The real number that a float in a graph stands for.

Every float is at least the dyadic rational it is. Two rules recognise a closed form instead. Neither confuses floats
that are more than a few units in the last place apart, so a factor of 1 + 1e-7 stays one:

- a rational with a denominator up to 10**6 that rounds to this very float: `0.1` is 1/10, `1e-05` is 1/100000;
- a small rational times a power of the square root of pi, times ln 2 or ln 10, or times the fourth root of a rational
  made of the primes up to 13, within two units in the last place: `0.7071067811865476` is 1/sqrt(2),
  `1.1283791670955126` is 2/sqrt(pi), and 1/sqrt(48) and its square root are factors of attention.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

_MAX_DENOMINATOR = 10**6
# Numbers with these prime factors have square roots in each of the fields.
_ROOTED_PRIMES = (2, 3, 5, 7, 11, 13)
_MAX_RADICAL = 2**16
_MAX_MULTIPLE = 64


@dataclass(frozen=True)
class ClosedForm:
    """`rational * radical**(1/4) * sqrt(pi)**root_pi * ln(2)**ln2 * ln(10)**ln10`."""

    rational: Fraction
    radical: Fraction = Fraction(1)
    root_pi: int = 0
    ln2: int = 0
    ln10: int = 0

    @property
    def is_rational(self) -> bool:
        return self == ClosedForm(self.rational)


_SYMBOLS: tuple[tuple[float, ClosedForm], ...] = (
    *(
        (math.sqrt(root) * math.sqrt(math.pi) ** power, ClosedForm(Fraction(1), Fraction(root**2), power))
        for root in (1, 2)
        for power in (-2, -1, 1, 2)
    ),
    *((math.log(2) ** power, ClosedForm(Fraction(1), ln2=power)) for power in (-1, 1)),
    *((math.log(10) ** power, ClosedForm(Fraction(1), ln10=power)) for power in (-1, 1)),
)


@lru_cache(maxsize=4096)
def closed_form(number: float) -> ClosedForm:
    """The closed form of a finite float."""
    exact = Fraction(number)
    if exact.denominator <= _MAX_DENOMINATOR:
        return ClosedForm(exact)
    near = exact.limit_denominator(_MAX_DENOMINATOR)
    if near and float(near) == number:
        return ClosedForm(near)
    return _symbolic_form(number) or _radical_form(number) or ClosedForm(exact)


def _symbolic_form(number: float) -> ClosedForm | None:
    size = abs(number)
    for value, symbol in _SYMBOLS:
        near = Fraction(size / value).limit_denominator(_MAX_MULTIPLE)
        if 0 < near.numerator <= _MAX_MULTIPLE and _is_close(float(near) * value, size):
            rational = near if number > 0 else -near
            return ClosedForm(rational, symbol.radical, symbol.root_pi, symbol.ln2, symbol.ln10)
    return None


def _radical_form(number: float) -> ClosedForm | None:
    size, sign = abs(number), Fraction(1 if number > 0 else -1)
    for power, root in ((2, math.sqrt), (4, lambda q: math.sqrt(math.sqrt(q)))):
        near = Fraction(size) ** power
        if not Fraction(1, _MAX_RADICAL) <= near <= _MAX_RADICAL:
            continue
        near = near.limit_denominator(_MAX_RADICAL) if near < 1 else 1 / (1 / near).limit_denominator(_MAX_RADICAL)
        is_small = max(near.numerator, near.denominator) <= _MAX_RADICAL
        if is_small and _is_rooted(near) and _is_close(root(float(near)), size):
            return ClosedForm(sign, near if power == 4 else near**2)
    return None


def _is_rooted(q: Fraction) -> bool:
    rest = q.numerator * q.denominator
    for prime in _ROOTED_PRIMES:
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= 2 * math.ulp(b)
