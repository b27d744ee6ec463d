"""Exact arithmetic on int64 tensors modulo a prime, and functions of which nothing is known but a few laws.

Why a graph cannot be evaluated exactly.

Which real number a float in a graph stands for.

Every float is first of all the dyadic rational it is. Two rules read more out of it, and neither confuses floats that
are further apart than a few units in the last place, so a factor of 1 + 1e-7 stays one:

- a rational with a denominator up to 10**6 that rounds to this very float: `0.1` is 1/10, `1e-05` is 1/100000;
- a small rational times a power of the square root of pi, times ln 2 or ln 10, or times the fourth root of a rational
  made of the primes up to 13, within two units in the last place: `0.7071067811865476` is 1/sqrt(2),
  `1.1283791670955126` is 2/sqrt(pi), and 1/sqrt(48) and its square root are what an attention divides by.
"""

import hashlib
import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._aiming import Aim


class UnsupportedError(Exception):
    """An operator, or a way to call one, is in no table. It ends as an inconclusive claim and never reaches a user."""


class UnfitError(Exception):
    """A rule cannot take what a node is given. It ends as an inconclusive claim and never reaches a user."""


MAX_DENOMINATOR = 10**6
# Numbers made of these have exact roots in each of our fields.
ROOTED_PRIMES = (2, 3, 5, 7, 11, 13)
_MAX_RADICAL = 2**16
_MAX_MULTIPLE = 64


@dataclass(frozen=True)
class Reading:
    """`rational * radical**(1/4) * sqrt(pi)**root_pi * ln(2)**ln2 * ln(10)**ln10`."""

    rational: Fraction
    radical: Fraction = Fraction(1)
    root_pi: int = 0
    ln2: int = 0
    ln10: int = 0

    @property
    def is_rational(self) -> bool:
        return self == Reading(self.rational)


_SYMBOLS: tuple[tuple[float, Reading], ...] = (
    *(
        (math.sqrt(root) * math.sqrt(math.pi) ** power, Reading(Fraction(1), Fraction(root**2), power))
        for root in (1, 2)
        for power in (-2, -1, 1, 2)
    ),
    *((math.log(2) ** power, Reading(Fraction(1), ln2=power)) for power in (-1, 1)),
    *((math.log(10) ** power, Reading(Fraction(1), ln10=power)) for power in (-1, 1)),
)


@lru_cache(maxsize=4096)
def reading_of(number: float) -> Reading:
    """The real number a finite float stands for."""
    exact = Fraction(number)
    if exact.denominator <= MAX_DENOMINATOR:
        return Reading(exact)
    near = exact.limit_denominator(MAX_DENOMINATOR)
    if near and float(near) == number:
        return Reading(near)
    return _symbolic(number) or _radical(number) or Reading(exact)


def _symbolic(number: float) -> Reading | None:
    size = abs(number)
    for value, symbol in _SYMBOLS:
        near = Fraction(size / value).limit_denominator(_MAX_MULTIPLE)
        if 0 < near.numerator <= _MAX_MULTIPLE and _is_close(float(near) * value, size):
            rational = near if number > 0 else -near
            return Reading(rational, symbol.radical, symbol.root_pi, symbol.ln2, symbol.ln10)
    return None


def _radical(number: float) -> Reading | None:
    size, sign = abs(number), Fraction(1 if number > 0 else -1)
    for power, root in ((2, math.sqrt), (4, lambda q: math.sqrt(math.sqrt(q)))):
        near = Fraction(size) ** power
        if not Fraction(1, _MAX_RADICAL) <= near <= _MAX_RADICAL:
            continue
        near = near.limit_denominator(_MAX_RADICAL) if near < 1 else 1 / (1 / near).limit_denominator(_MAX_RADICAL)
        is_small = max(near.numerator, near.denominator) <= _MAX_RADICAL
        if is_small and _is_rooted(near) and _is_close(root(float(near)), size):
            return Reading(sign, near if power == 4 else near**2)
    return None


def _is_rooted(q: Fraction) -> bool:
    rest = q.numerator * q.denominator
    for prime in ROOTED_PRIMES:
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= 2 * math.ulp(b)


# Primes under 2**31 that are 7 modulo 8 and in whose fields 2, 3, 5, 7, 11 and 13 are squares, and so have roots.
PRIMES = tuple(2**31 - gap for gap in (249, 2337, 4857, 9489, 11337, 11577, 12897, 15417, 15777, 16089, 28017, 28809))
_MIX = (-7046029254386353131, -4658895280553007687)
_HALF_BITS = 16
# A product of two halves has 32 bits, two of them are added, and a float64 holds integers of 53 bits.
_MAX_TERMS = 2**19


@dataclass
class Journal:
    """What happened in an evaluation: the node under way, the outcomes of its comparisons, divisions by zero.

    `sizes` are the real numbers that were compared when the same graph was evaluated in reals, in the order they were
    asked for: a field has no order, so it is told.
    """

    node: str = ""
    is_deciding: bool = True
    comparisons: int = 0
    asked: int = 0
    sizes: dict[str, Tensor] = field(default_factory=dict)
    outcomes: dict[str, set[bool]] = field(default_factory=dict)
    zero_divisions: set[str] = field(default_factory=set)
    has_nan: bool = False

    def begin(self, node: str, is_deciding: bool = True) -> None:
        """Outcomes of a node that no leaf decides are not noted: they cannot be others."""
        self.node, self.is_deciding, self.comparisons, self.asked = node, is_deciding, 0, 0

    def next_place(self) -> str:
        self.asked += 1
        return f"{self.node}#{self.asked}"

    def compared(self, outcome: Tensor) -> None:
        self.comparisons += 1
        if not self.is_deciding or not outcome.numel():
            return
        both = self.outcomes.setdefault(f"{self.node}#{self.comparisons}", set())
        if len(both) < 2:
            both.update({bool(outcome.any()), bool(outcome.all())})

    def start(self) -> None:
        """Forget what the last trial was like."""
        self.outcomes, self.zero_divisions, self.has_nan = {}, set(), False


@dataclass(frozen=True)
class Field:
    """The integers modulo `prime`. `key` chooses the unknown functions, `aim` the points."""

    prime: int
    key: int
    journal: Journal = field(default_factory=Journal)
    aim: Aim = field(default_factory=Aim)
    dtype: ClassVar[torch.dtype] = torch.int64

    def reduced(self, a: Tensor) -> Tensor:
        """An element for each integer."""
        return a % self.prime

    def constant(self, c: float | Fraction) -> Tensor:
        return torch.tensor(self.number(c), dtype=self.dtype)

    def sizes(self, a: Tensor) -> Tensor:
        """The real numbers that elements stand for, as they were in the reals."""
        place = self.journal.next_place()
        if place not in self.journal.sizes:
            raise UnsupportedError("a comparison of elements of which no real number is known")
        return self.journal.sizes[place]

    def number(self, c: float | Fraction) -> int:
        """The element a number stands for. Infinities and NaN are unknowns of their own."""
        if isinstance(c, int | Fraction):
            return self._ratio(Fraction(c))
        if math.isnan(c):
            return self._unknown("nan")
        if math.isinf(c):
            return self._unknown("inf") if c > 0 else self.prime - self._unknown("inf")
        read = reading_of(c)
        element = self._ratio(read.rational)
        if read.radical != 1:
            # The root of a square by this power is a square itself, so the root of a product is that of its factors.
            element *= pow(self._ratio(read.radical), ((self.prime + 1) // 4) ** 2, self.prime)
        for name, power in (("root_pi", read.root_pi), ("ln2", read.ln2), ("ln10", read.ln10)):
            element = element * pow(self._unknown(name), power, self.prime) % self.prime
        return element

    def tensor(self, values: Tensor) -> Tensor:
        """A tensor of numbers, element by element."""
        if values.dtype == torch.bool:
            return values.to(torch.int64)
        if not values.is_floating_point():
            return values.to(torch.int64) % self.prime
        seen = {c: self.number(c) for c in set(values.flatten().tolist())}
        return torch.tensor([seen[c] for c in values.flatten().tolist()], dtype=torch.int64).reshape(values.shape)

    def _ratio(self, q: Fraction) -> int:
        return q.numerator % self.prime * pow(q.denominator % self.prime, -1, self.prime) % self.prime

    def _unknown(self, name: str) -> int:
        return _digest(f"{self.key}:{name}") % (self.prime - 1) + 1

    def random(self, name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Elements that nothing else depends on, the same for the same name."""
        generator = torch.Generator().manual_seed(_digest(f"{self.key}:random:{name}"))
        return torch.randint(1, self.prime, tuple(shape), generator=generator, dtype=torch.int64)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return (a + b) % self.prime

    def sub(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b) % self.prime

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b % self.prime

    def power(self, a: Tensor, n: int) -> Tensor:
        """`a ** n` for any integer n."""
        if n < 0:
            return self.power(self.inverse(a), -n)
        result, base = torch.ones_like(a), a
        while n:
            if n & 1:
                result = self.mul(result, base)
            base, n = self.mul(base, base), n >> 1
        return result

    def inverse(self, a: Tensor) -> Tensor:
        """`1 / a`; what has none becomes 0 and is counted."""
        if not bool(a.all()):
            self.journal.zero_divisions.add(self.journal.node)
        result, base, n = torch.ones_like(a), a, self.prime - 2
        while n:
            if n & 1:
                result = self.mul(result, base)
            base, n = self.mul(base, base), n >> 1
        return result

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """The exact product of two matrices, by float64 products of their 16-bit halves."""
        if a.shape[-1] > _MAX_TERMS:
            half = a.shape[-1] // 2
            left = self.matmul(a[..., :half], b[..., :half, :])
            return self.add(left, self.matmul(a[..., half:], b[..., half:, :]))
        low = 2**_HALF_BITS - 1
        a0, a1 = (a & low).to(torch.float64), (a >> _HALF_BITS).to(torch.float64)
        b0, b1 = (b & low).to(torch.float64), (b >> _HALF_BITS).to(torch.float64)
        high = (a1 @ b1).to(torch.int64) % self.prime
        middle = (a0 @ b1 + a1 @ b0).to(torch.int64) % self.prime
        shifted = ((high << _HALF_BITS) + middle) % self.prime
        return ((shifted << _HALF_BITS) + (a0 @ b0).to(torch.int64)) % self.prime

    def total(self, a: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
        """The sum over some dimensions; none for an empty list."""
        return a.sum(dims, keepdim=keepdim) % self.prime if dims else a

    def unknown_function(self, name: str, *arguments: Tensor) -> Tensor:
        """Of a function nothing is known: nonzero elements that look random, equal where the arguments are."""
        key = _digest(f"{self.key}:function:{name}") - 2**61
        mixed = torch.full((), key, dtype=torch.int64)
        for argument in arguments:
            mixed = (mixed ^ argument) * _MIX[0] + key
            mixed = (mixed ^ (mixed >> 29)) * _MIX[1]
            mixed = mixed ^ (mixed >> 32)
        return (mixed & (2**62 - 1)) % (self.prime - 1) + 1

    def folded(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """The smaller of an element and its negative, and where that is the negative."""
        is_negative = a > self.prime // 2
        return torch.where(is_negative, self.prime - a, a), is_negative


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
