"""Exact arithmetic modulo a prime, the same operations on real numbers, and a trace of an evaluation.

Elements of a field are int64 tensors. Functions such as exp are unknown functions: they map equal elements to equal,
otherwise random elements.

A field has no order. So a graph is first evaluated in `Reals`, in float64, which stores each number that is compared in
the trace; the evaluation in the field then reads these numbers back, in the same order, to decide its comparisons.
"""

import hashlib
import math
import random
from dataclasses import dataclass, field
from enum import IntEnum
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor

from torchguard.compiled.certify.algebra._closed_form import closed_form


class UnsupportedError(Exception):
    """An operator, or this way to call it, has no rule: the claim is inconclusive. It never reaches a user."""


class Kind(IntEnum):
    """What a number is taken to be by the tests for infinity and NaN."""

    FINITE = 0
    POSITIVE_INFINITY = 1
    NEGATIVE_INFINITY = 2
    NAN = 3


class EvaluationError(Exception):
    """A rule failed on the values of a sample, such as an index out of range: another sample may do."""


# Modulo a prime of a field these are squares, and so is 2: the prime is 7 modulo 8.
_SQUARES = (3, 5, 7, 11, 13)
_REAL_FUNCTIONS = {
    name: getattr(torch, name)
    for name in ("exp", "log", "sqrt", "erf", "asin", "acos", "atan", "asinh", "acosh", "atanh", "lgamma", "erfinv")
    + ("atan2", "logaddexp", "pow", "i0")
} | {
    "tan_half": lambda x: torch.tan(x / 2),
    **{name: getattr(torch.special, name) for name in ("erfcx", "log_ndtr", "i1")},
}
_MIX = (-7046029254386353131, -4658895280553007687)
_HALF_BITS = 16
# A product of two halves has 32 bits, two of them are added, and a float64 holds integers of 53 bits.
_MAX_TERMS = 2**19
_MERSENNE = 2**31 - 1
TakenFor = Literal["", "some", "infinite", "negative", "nan"]
# The largest number of outcomes of one node that are recorded.
_MAX_OUTCOMES = 2**24


def draw_prime(rng: random.Random) -> int:
    """A random prime below 2**31 that is 7 modulo 8, and modulo which the numbers up to 13 are squares."""
    while True:
        n = rng.randrange(2**30, 2**31) | 7
        is_likely = all(pow(base, n - 1, n) == 1 for base in (2, *_SQUARES))
        if is_likely and all(pow(q, (n - 1) // 2, n) == 1 for q in _SQUARES) and _is_prime(n):
            return n


def _is_prime(n: int) -> bool:
    return all(n % d for d in range(3, math.isqrt(n) + 1, 2))


@dataclass
class EvaluationTrace:
    """What happened in an evaluation: the current node, the outcomes of comparisons, and divisions by zero.

    Attributes:
        node: the key of the current node.
        is_input_dependent: whether the values of a leaf decide the comparisons of the current node.
        real_values: the real numbers that comparisons read, by node and position.
        outcomes: for each comparison or index, by node and position, which outcomes each element had, and which it
            could have had.
        steps: for each step function, by node and position, its values.
        zero_divisions: the nodes that divided by zero.
        has_nan: whether a real number that is compared is NaN.
        has_nonfinite: whether a number was taken to be infinite or NaN.
        flipped: the key of a node whose boolean results are inverted.
        frees_extrema: whether a maximum or minimum is any element, whatever its row holds: see `Search`.
        free: the keys of the extrema that were free.
    """

    node: str = ""
    flipped: str = ""
    frees_extrema: bool = False
    free: set[str] = field(default_factory=set)
    is_input_dependent: bool = True
    records: int = 0
    reads: int = 0
    real_values: dict[str, Tensor] = field(default_factory=dict)
    outcomes: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    steps: dict[str, Tensor] = field(default_factory=dict)
    zero_divisions: set[str] = field(default_factory=set)
    has_nan: bool = False
    has_nonfinite: bool = False

    def enter_node(self, node: str, is_input_dependent: bool = True) -> None:
        """Start a node. The outcomes of one that depends on no input are not recorded: they are always the same."""
        self.node, self.is_input_dependent, self.records, self.reads = node, is_input_dependent, 0, 0

    def next_read(self) -> str:
        """The key of the next real number that the current node reads."""
        self.reads += 1
        return f"{self.node}#{self.reads}"

    def record_comparison(self, outcome: Tensor) -> None:
        """Record which elements of a comparison are true."""
        self.record_index(outcome.to(torch.int64), 2)

    def record_index(
        self, index: Tensor, count: int, is_possible: Tensor | None = None, *, is_free: bool = False
    ) -> None:
        """Record which of `count` positions the numbers of an element choose; some may be impossible for an element."""
        self.records += 1
        if is_free:
            self.free.add(f"{self.node}#{self.records}")
        if not self.is_input_dependent or not index.numel():
            return
        if index.numel() * count > _MAX_OUTCOMES:
            raise UnsupportedError(f"a choice among {count} positions for {index.numel()} elements: too many to cover")
        seen = torch.nn.functional.one_hot(index.reshape(-1), count).bool()
        possible = torch.ones_like(seen) if is_possible is None else is_possible.reshape(-1, count)
        self.outcomes[f"{self.node}#{self.records}"] = seen, possible

    def record_step(self, values: Tensor) -> None:
        """Record the values of a step function, which has to have different ones for each element."""
        self.records += 1
        if self.is_input_dependent and values.numel():
            self.steps[f"{self.node}#{self.records}"] = values.reshape(-1)

    def record_zero_division(self) -> None:
        self.zero_divisions.add(self.node)

    def reset(self) -> None:
        """Start the next sample."""
        self.outcomes, self.steps, self.zero_divisions = {}, {}, set()
        self.has_nan = self.has_nonfinite = False


@dataclass(frozen=True)
class PrimeField:
    """The integers modulo `prime`.

    Attributes:
        key: chooses the unknown functions and the random elements.
        taken_for: which elements tests for infinity and NaN hold for: none, some, or all; see `kinds`.
    """

    prime: int
    key: int
    trace: EvaluationTrace = field(default_factory=EvaluationTrace)
    taken_for: TakenFor = ""
    dtype: ClassVar[torch.dtype] = torch.int64

    def reduced(self, a: Tensor) -> Tensor:
        """Integers as elements."""
        return a % self.prime

    def constant(self, c: float | Fraction) -> Tensor:
        return torch.tensor(self.number(c), dtype=self.dtype)

    def real_values(self, a: Tensor) -> Tensor:
        """The real numbers that elements stand for, as `Reals` stored them."""
        key = self.trace.next_read()
        if key not in self.trace.real_values:
            raise UnsupportedError("a comparison of elements whose real numbers are not known")
        return self.trace.real_values[key]

    def kinds(self, a: Tensor) -> Tensor:
        """What elements are taken to be by tests for infinity and NaN: the numbers of `Kind`.

        A field has no infinities. So that the branch behind such a test is evaluated all the same, some elements are
        taken for infinite or NaN by these tests alone; in arithmetic they stay what they are. `Reals` decides which:
        numbers of equal size are of equal kind, and infinities have the sign of the number.
        """
        kinds = self.real_values(a)
        self.trace.has_nonfinite |= bool(kinds.any())
        return kinds

    def number(self, c: float | Fraction) -> int:
        """The element that stands for a number. Infinities and NaN are unknown elements."""
        if isinstance(c, int | Fraction):
            return self._ratio(Fraction(c))
        if math.isnan(c):
            return self._unknown("nan")
        if math.isinf(c):
            return self._unknown("inf") if c > 0 else self.prime - self._unknown("inf")
        form = closed_form(c)
        element = self._ratio(form.rational)
        if form.radical != 1:
            # This power of a square is its root that is a square itself, so roots of products are products of roots.
            element *= pow(self._ratio(form.radical), ((self.prime + 1) // 4) ** 2, self.prime)
        for name, power in (("root_pi", form.root_pi), ("ln2", form.ln2), ("ln10", form.ln10)):
            element = element * pow(self._unknown(name), power, self.prime) % self.prime
        return element

    def tensor(self, values: Tensor) -> Tensor:
        """The elements that stand for the numbers of a tensor."""
        if values.dtype == torch.bool:
            return values.to(torch.int64)
        if not values.is_floating_point():
            return values.to(torch.int64) % self.prime
        elements = {c: self.number(c) for c in set(values.flatten().tolist())}
        return torch.tensor([elements[c] for c in values.flatten().tolist()], dtype=torch.int64).reshape(values.shape)

    def _ratio(self, q: Fraction) -> int:
        return q.numerator % self.prime * pow(q.denominator % self.prime, -1, self.prime) % self.prime

    def _unknown(self, name: str) -> int:
        return _digest(f"{self.key}:{name}") % (self.prime - 1) + 1

    def random(self, name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """Random nonzero elements, the same for the same name."""
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
        """`1 / a`; for 0 it is 0, and the trace records a division by zero."""
        if not bool(a.all()):
            self.trace.record_zero_division()
        result, base, n = torch.ones_like(a), a, self.prime - 2
        while n:
            if n & 1:
                result = self.mul(result, base)
            base, n = self.mul(base, base), n >> 1
        return result

    def root(self, a: Tensor, q: Fraction) -> Tensor:
        """`a ** q`. Where each element has one root of this degree, it is that; otherwise an unknown function."""
        order = self.prime - 1
        if math.gcd(q.denominator, order) > 1:
            return self.unknown_function(f"pow {q}", a)
        return self.power(a, q.numerator * pow(q.denominator, -1, order) % order)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """The exact product of two matrices, computed by float64 products of their 16-bit halves."""
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
        """The sum over some dimensions; an empty list sums over none."""
        return a.sum(dims, keepdim=keepdim) % self.prime if dims else a

    def unknown_function(self, name: str, *arguments: Tensor) -> Tensor:
        """A function of which nothing is known: random nonzero elements, equal where the arguments are equal."""
        key = _digest(f"{self.key}:function:{name}") - 2**61
        mixed = torch.full((), key, dtype=torch.int64)
        for argument in arguments:
            mixed = (mixed ^ argument) * _MIX[0] + key
            mixed = (mixed ^ (mixed >> 29)) * _MIX[1]
            mixed = mixed ^ (mixed >> 32)
        return (mixed & (2**62 - 1)) % (self.prime - 1) + 1

    def folded(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """The smaller of an element and its negative, and where that is the negative one."""
        is_negative = a > self.prime // 2
        return torch.where(is_negative, self.prime - a, a), is_negative


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


@dataclass(frozen=True)
class Reals(PrimeField):
    """Real numbers in float64, with the operations of a field. They only decide comparisons: rounding is no concern."""

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

    def root(self, a: Tensor, q: Fraction) -> Tensor:
        return a ** float(q)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    def total(self, a: Tensor, dims: list[int], keepdim: bool = False) -> Tensor:
        return a.sum(dims, keepdim=keepdim) if dims else a

    def unknown_function(self, name: str, *arguments: Tensor) -> Tensor:
        if name.startswith("polygamma "):
            return torch.polygamma(int(name.removeprefix("polygamma ")), arguments[0])
        if name not in _REAL_FUNCTIONS:
            raise UnsupportedError(name)
        return _REAL_FUNCTIONS[name](*arguments)

    def folded(self, a: Tensor) -> tuple[Tensor, Tensor]:
        return a.abs(), a < 0

    def real_values(self, a: Tensor) -> Tensor:
        self.trace.real_values[self.trace.next_read()] = a
        return a

    def kinds(self, a: Tensor) -> Tensor:
        infinite = torch.where(a > 0, Kind.POSITIVE_INFINITY, Kind.NEGATIVE_INFINITY)
        if self.taken_for == "some":
            # As float32: two graphs may compute one number with different rounding errors.
            bits = a.abs().to(torch.float32).view(torch.int32).to(torch.int64)
            drawn = PrimeField(_MERSENNE, self.key).unknown_function("kind", bits) % 8
            finite_or_nan = torch.where(drawn == 0, Kind.NAN, Kind.FINITE)
            kinds = torch.where(drawn > 5, infinite, finite_or_nan)
        else:
            same = {"": Kind.FINITE, "negative": Kind.NEGATIVE_INFINITY, "nan": Kind.NAN}
            kinds = torch.full_like(infinite, same[self.taken_for]) if self.taken_for in same else infinite
        # Zero is what it is: where a factor is zero, what stands behind such a test may not matter.
        return self.real_values(torch.where(a == 0, Kind.FINITE, kinds))
