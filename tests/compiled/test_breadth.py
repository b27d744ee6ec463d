"""Derivatives against JAX and against differences, and how much certificates cover."""

import pytest
import torch
from tests.compiled.breadth import ARGUMENTS, FUNCTIONS, JAX, directions
from tests.compiled.test_hvp import hvp_by_differences

from torchguard.compiled import compile_out
from torchguard.compiled._trace import output_values
from torchguard.exceptions import TorchGuardError

# JAX has no bicubic resampling of this kind; its entry holds something else.
NO_ORACLE = {"bicubic"}
# Control flow that depends on values, and shapes that do.
REFUSED = {"cond", "while_loop", "scan", "nll_gauss", "cov_corrcoef", "lstsq"}
pytestmark = pytest.mark.long


def compiled(name):
    x = tuple(torch.tensor(argument) for argument in ARGUMENTS[name])
    return compile_out(FUNCTIONS[name], *x, backend="eager", probe=False), x


def expected(name, kind, count):
    keys = [f"{name}/{kind}/{i}" for i in range(count)]
    return [torch.tensor(JAX[key]) for key in keys] if all(key in JAX for key in keys) else None


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - REFUSED - NO_ORACLE))
def test_value_and_first_derivatives_are_those_of_jax(name):
    c, x = compiled(name)
    outputs = output_values(c.graphs.forward)
    v, w = directions(x, outputs)
    kept = [one for one in v if one is not None]
    eager = {"v": lambda: c.value_at(x)}
    eager["jvp"] = lambda: c.derivative_at("jvp", x, kept, w)
    eager["vjp"] = lambda: c.derivative_at("vjp", x, kept, w)
    for kind, run in eager.items():
        try:
            found = list(run())
        except TorchGuardError:
            continue  # torch has no rule, and the certificate says so
        right = expected(name, kind, len(found))
        for got, one in zip(found, right or [], strict=False):
            torch.testing.assert_close(got, one.to(got.dtype), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", sorted(set(FUNCTIONS) - REFUSED))
def test_second_derivatives_are_those_of_differences(name):
    c, x = compiled(name)
    outputs = c.value_at(x)
    if len(outputs) != 1 or not all(leaf.is_floating_point() for leaf in x):
        return
    v, w = directions(x, outputs)
    try:
        found = c.derivative_at("hvp", x, v, w)
    except TorchGuardError:
        return
    for got, one in zip(found, hvp_by_differences(FUNCTIONS[name], x, v, w[0]), strict=True):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)


def test_refused_functions_are_refused_with_a_message():
    for name in REFUSED:
        with pytest.raises(TorchGuardError, match=r"value|functions|shape"):
            compiled(name)
