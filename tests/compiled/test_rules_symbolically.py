"""Each rule of a derivative, as mathematics: the derivative of the one formula is the other."""

from fractions import Fraction

import pytest
import sympy as sp
import torch

from torchguard.compiled.certify.algebra._closed_form import closed_form
from torchguard.compiled.certify.algebra._rules import activations, choices, pointwise
from torchguard.compiled.certify.algebra._values import DERIVATIVES

FORMULAS = {**pointwise.RULES, **choices.RULES, **activations.RULES}

X = sp.Symbol("x", real=True)


def exact(number):
    """The number a float stands for, by the same closed form as in a field."""
    if isinstance(number, int | Fraction):
        return sp.Rational(number)
    form = closed_form(float(number))
    radical = sp.Rational(form.radical) ** sp.Rational(1, 4)
    return (
        sp.Rational(form.rational)
        * radical
        * sp.sqrt(sp.pi) ** form.root_pi
        * sp.log(2) ** form.ln2
        * sp.log(10) ** form.ln10
    )


class Symbolic:
    """A formula in x, and the value x has when a comparison asks for one."""

    def __init__(self, formula, at):
        self.formula, self.at = sp.sympify(formula), sp.Rational(at)

    def of(self, other):
        return other if isinstance(other, Symbolic) else Symbolic(exact(other), self.at)

    def made(self, formula):
        return Symbolic(formula, self.at)

    def __add__(self, other):
        return self.made(self.formula + self.of(other).formula)

    def __sub__(self, other):
        return self.made(self.formula - self.of(other).formula)

    def __mul__(self, other):
        return self.made(self.formula * self.of(other).formula)

    def __truediv__(self, other):
        return self.made(self.formula / self.of(other).formula)

    def __rsub__(self, other):
        return self.of(other) - self

    def __rtruediv__(self, other):
        return self.of(other) / self

    def __pow__(self, other):
        return self.made(self.formula ** exact(other))

    def __neg__(self):
        return self.made(-self.formula)

    __radd__, __rmul__ = __add__, __mul__

    def __getattr__(self, name):
        if name in ("odd", "even", "function"):
            return lambda which: self.made(SYMPY.get(which, getattr(sp, which, None))(self.formula))
        if name == "lgamma":
            return lambda: self.made(sp.loggamma(self.formula))
        if hasattr(sp, name):
            return lambda: self.made(getattr(sp, name)(self.formula))
        raise AttributeError(name)

    def sigmoid(self):
        return self.made(1 / (1 + sp.exp(-self.formula)))

    def sgn(self):
        return self.made(sp.sign(self.value()))

    def value(self):
        return self.formula.subs(X, self.at).evalf(30)

    def gt(self, other):
        return Known(self.value() > self.of(other).value(), self)

    def lt(self, other):
        return Known(self.value() < self.of(other).value(), self)

    def ge(self, other):
        return Known(self.value() >= self.of(other).value(), self)

    def le(self, other):
        return Known(self.value() <= self.of(other).value(), self)

    def eq(self, other):
        return Known(False, self)


class Known:
    def __init__(self, is_true, like):
        self.is_true, self.like = bool(is_true), like

    def where(self, yes, no):
        return self.like.of(yes if self.is_true else no)


def is_zero(formula):
    formula = formula.rewrite(sp.erf) if formula.has(sp.erfc) else formula
    formula = sp.besselsimp(formula.expand(func=True)) if formula.has(sp.besseli) else formula
    if formula == 0 or sp.simplify(formula) == 0 or sp.simplify(formula.rewrite(sp.exp)) == 0:
        return True
    return sp.simplify(sp.expand(formula.rewrite(sp.exp), complex=False)) == 0


SYMPY = {
    "lgamma": sp.loggamma,
    "erfinv": sp.erfinv,
    "sqrt": sp.sqrt,
    "erfcx": lambda x: sp.exp(x**2) * sp.erfc(x),
    "log_ndtr": lambda x: sp.log(sp.erfc(-x / sp.sqrt(2)) / 2),
    "i0": lambda x: sp.besseli(0, x),
    "i1": lambda x: sp.besseli(1, x),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_the_derivative_of_each_function_is_what_the_table_says(name):
    positive = sp.Symbol("x", positive=True) if name in ("log", "sqrt", "lgamma", "acosh") else X
    y = SYMPY.get(name, getattr(sp, name, None))(positive)
    slope = DERIVATIVES[name](Symbolic(positive, Fraction(1, 3)), Symbolic(y, Fraction(1, 3)))
    assert is_zero((sp.diff(y, positive) - slope.formula).subs(positive, X if name != "acosh" else positive))


# What is a composition of these is differentiated by the chain rule: it has to be the right composition.
DEFINITIONS = {
    "exp2": lambda x: 2**x,
    "expm1": lambda x: sp.exp(x) - 1,
    "log1p": lambda x: sp.log(1 + x),
    "log2": lambda x: sp.log(x, 2),
    "log10": lambda x: sp.log(x, 10),
    "rsqrt": lambda x: 1 / sp.sqrt(x),
    "tan": sp.tan,
    "sinh": sp.sinh,
    "cosh": sp.cosh,
    "tanh": sp.tanh,
    "sigmoid": lambda x: 1 / (1 + sp.exp(-x)),
    "erfc": sp.erfc,
    "reciprocal": lambda x: 1 / x,
    "square": lambda x: x**2,
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_each_composition_is_the_function_it_stands_for(name):
    x = sp.Symbol("x", positive=True)
    result = FORMULAS[name](Symbolic(x, Fraction(1, 3))).formula
    assert is_zero(result - DEFINITIONS[name](x))


# The forward rule, how to call it, the backward rule, how to call it with a cotangent of 1.
PAIRS = {
    "relu": (("relu",), ("threshold_backward", 0)),
    "leaky_relu": (("leaky_relu", 0.1), ("leaky_relu_backward", 0.1, False)),
    "silu": (("silu",), ("silu_backward",)),
    "mish": (("mish",), ("mish_backward",)),
    "softplus": (("softplus", 2, 20), ("softplus_backward", 2, 20)),
    "hardtanh": (("hardtanh", -1, 2), ("hardtanh_backward", -1, 2)),
    "hardsigmoid": (("hardsigmoid",), ("hardsigmoid_backward",)),
    "hardswish": (("hardswish",), ("hardswish_backward",)),
    "softshrink": (("softshrink", 0.5), ("softshrink_backward", 0.5)),
    "hardshrink": (("hardshrink", 0.5), ("hardshrink_backward", 0.5)),
    "gelu": (("gelu",), ("gelu_backward",)),
}
PLACES = [Fraction(n, 10) for n in (-50, -21, -7, -2, 3, 8, 19, 45, 250)]


@pytest.mark.parametrize("name", PAIRS)
def test_each_backward_formula_is_the_derivative_of_its_forward_one(name):
    (forward, *settings), (backward, *others) = PAIRS[name]
    wrong = []
    for at in PLACES:
        x, one = Symbolic(X, at), Symbolic(1, at)
        y = FORMULAS[forward](x, *settings)
        slope = FORMULAS[backward](one, x, *others)
        if not is_zero(sp.diff(y.formula, X) - slope.formula):
            wrong.append(at)
    assert wrong == []


@pytest.mark.parametrize("at", PLACES[::3], ids=str)
def test_gelu_by_tanh_has_the_derivative_of_its_formula(at):
    x, one = Symbolic(X, at), Symbolic(1, at)
    y = FORMULAS["gelu"](x, approximate="tanh")
    slope = FORMULAS["gelu_backward"](one, x, approximate="tanh")
    assert is_zero(sp.diff(y.formula, X) - slope.formula)


@pytest.mark.parametrize("is_result", [False, True])
@pytest.mark.parametrize("at", [Fraction(-2), Fraction(3)], ids=str)
def test_elu_has_the_derivative_of_its_formula(at, is_result):
    x, one = Symbolic(X, at), Symbolic(1, at)
    y = FORMULAS["elu"](x, 1.5, 2, 3)
    given = Symbolic(y.formula, at) if is_result else x
    slope = FORMULAS["elu_backward"](one, 1.5, 2, 3, is_result, given)
    assert is_zero(sp.diff(y.formula, X) - slope.formula)


@pytest.mark.parametrize("at", [Fraction(-2), Fraction(3)], ids=str)
def test_log_sigmoid_has_the_derivative_of_its_formula_and_is_the_log_of_sigmoid(at):
    x, one = Symbolic(X, at), Symbolic(1, at)
    y, z = FORMULAS["log_sigmoid_forward"](x)
    slope = FORMULAS["log_sigmoid_backward"](one, x, z)
    assert is_zero(sp.diff(y.formula, X) - slope.formula)
    assert abs((y.formula - sp.log(1 / (1 + sp.exp(-X)))).subs(X, at).evalf(40)) < 1e-30


@pytest.mark.parametrize("e", [2, 3, -1, 0.5, 1.5, 0.3])
def test_a_power_has_the_derivative_of_a_power(e):
    x = sp.Symbol("x", positive=True)
    y = x ** exact(e)
    assert is_zero(sp.diff(y, x) - exact(e) * x ** (exact(e) - 1))


def test_tanh_and_sigmoid_by_their_results():
    for name, y in (("tanh", sp.tanh(X)), ("sigmoid", 1 / (1 + sp.exp(-X)))):
        slope = FORMULAS[f"{name}_backward"](Symbolic(1, 0), Symbolic(y, 0))
        assert is_zero(sp.diff(y, X) - slope.formula)


# The same formulas on numbers, against torch: that they are the formulas of these operators.
class Number:
    """A float64 tensor under the names that rules call."""

    def __init__(self, t):
        self.t = t

    def of(self, other):
        return other.t if isinstance(other, Number) else other

    def __getattr__(self, name):
        names = {"inverted": torch.logical_not}
        if name in ("odd", "even", "function"):
            return lambda which: Number(getattr(torch if hasattr(torch, which) else torch.special, which)(self.t))
        fn = names.get(name) or getattr(torch, name)
        return lambda *args: Number(fn(self.t, *map(self.of, args)))

    def where(self, yes, no):
        return Number(torch.where(self.t, self.of(yes), self.of(no)))

    def __add__(self, other):
        return Number(self.t + self.of(other))

    def __sub__(self, other):
        return Number(self.t - self.of(other))

    def __mul__(self, other):
        return Number(self.t * self.of(other))

    def __truediv__(self, other):
        return Number(self.t / self.of(other))

    def __rsub__(self, other):
        return Number(other - self.t)

    def __rtruediv__(self, other):
        return Number(other / self.t)

    def __neg__(self):
        return Number(-self.t)

    def __pow__(self, e):
        return Number(self.t**e)

    __radd__, __rmul__ = __add__, __mul__


SETTINGS = {
    "leaky_relu": (0.1,),
    "leaky_relu_backward": (0.1, False),
    "threshold": (0.5, -1.0),
    "threshold_backward": (0.0,),
    "softplus": (2, 20),
    "softplus_backward": (2, 20),
    "hardtanh": (-1, 2),
    "hardtanh_backward": (-1, 2),
    "softshrink": (0.5,),
    "softshrink_backward": (0.5,),
    "hardshrink": (0.5,),
    "hardshrink_backward": (0.5,),
    "clamp": (-0.5, 1.0),
    "clamp_min": (0.2,),
    "clamp_max": (0.2,),
    "pow": (3,),
}
TWO = {"add", "sub", "rsub", "mul", "div", "maximum", "minimum", "gt", "lt", "ge", "le", "eq", "ne"}
THREE = {"addcmul", "addcdiv"}
# Those that take integers, whose rule is an unknown function, or is of the field: no number in it is NaN.
NOT_FORMULAS = {name for name in FORMULAS if name.startswith(("logical", "bitwise"))}
NOT_FORMULAS |= {"isnan", "isinf", "isposinf", "isneginf", "isfinite", "frac", "fmod", "remainder", "polygamma"}
NOT_FORMULAS |= {"floor", "ceil", "round", "trunc", "atan2", "logaddexp", "where", "masked_fill", "lerp", "digamma"}
NOT_FORMULAS |= {
    "elu_backward",
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "log_sigmoid_backward",
    "log_sigmoid_forward",
}
RANGES = {"acosh": (1.1, 3.0), "asin": (-0.9, 0.9), "acos": (-0.9, 0.9), "atanh": (-0.9, 0.9), "erfinv": (-0.9, 0.9)}
POSITIVE = {"log", "log1p", "log2", "log10", "sqrt", "rsqrt", "lgamma"}


@pytest.mark.parametrize("name", sorted(set(FORMULAS) - NOT_FORMULAS))
def test_each_formula_computes_what_torch_does(name):
    low, high = (0.1, 3.0) if name in POSITIVE else RANGES.get(name, (-4.0, 4.0))
    x = torch.linspace(low, high, 41, dtype=torch.float64)
    y = torch.linspace(0.4, 2.0, 41, dtype=torch.float64).flip(0)
    operands = [x, y, y + 1][: 3 if name in THREE else 2 if name in TWO or name.endswith("_backward") else 1]
    if name.endswith("_backward"):
        operands = [y, x] if name not in ("tanh_backward", "sigmoid_backward") else [x, y]
    settings = SETTINGS.get(name, ())
    op = getattr(torch.ops.aten, name)
    result = FORMULAS[name](*map(Number, operands), *settings).t
    expected = op(*operands, *settings)
    # Torch divides by six with a sixth of single precision there, whatever the dtype.
    rtol = 1e-7 if name == "hardsigmoid_backward" else 1e-12
    assert torch.allclose(result.to(torch.float64), expected.to(torch.float64), rtol=rtol, atol=1e-13)


def test_the_shift_in_a_stable_loss_has_no_derivative():
    """Why a mutant survives that zeroes what flows back into the shift of a binary cross entropy."""
    x, m = sp.symbols("x m", real=True)
    loss = m + sp.log(sp.exp(-m) + sp.exp(-x - m))
    assert sp.simplify(sp.diff(loss, m)) == 0
