"""Annotations of jaxtyping are understood as well, and share their names with ours."""

import numpy as np
import pytest
import torch
from jaxtyping import Bool, Float, Float32, Int, Integer, Num, Shaped
from torch import nn

from torchguard import DimensionMismatchError, DTypeMismatchError, InvalidParameterError, tensorcheck
from torchguard.typing import Dim, Tensor, float32_t

T = torch.Tensor


def fits(annotation, *shapes, dtype=torch.float32):
    """Whether tensors of these shapes can be arguments declared so."""

    @tensorcheck
    def f(*xs: annotation) -> None: ...

    try:
        f(*(torch.ones(shape, dtype=dtype) for shape in shapes))
    except (DimensionMismatchError, DTypeMismatchError):
        return False
    return True


@pytest.mark.parametrize(
    ("text", "shapes", "verdict"),
    [
        ("batch seq", [(2, 3), (2, 3)], True),
        ("batch seq", [(2, 3), (2, 4)], False),
        ("batch batch", [(2, 3)], False),
        ("", [()], True),
        ("", [(1,)], False),
        ("2 3", [(2, 3)], True),
        ("rows=2 cols=3", [(2, 3)], True),
        ("rows=2 cols=3", [(2, 4)], False),
        ("_ seq", [(2, 3), (9, 3)], True),
        ("_batch seq", [(2, 3), (9, 3)], True),
        ("... n", [(3,), (2, 3), (1, 2, 3)], True),
        ("... n", [(3,), (2, 4)], False),
        ("*batch n", [(2, 3, 4), (2, 3, 4)], True),
        ("*batch n", [(2, 3, 4), (3, 4)], False),
        ("*_ n", [(2, 3, 4), (3, 4)], True),
        ("*#batch n", [(2, 1, 4), (3, 4), (1, 1, 4)], True),
        ("*#batch n", [(2, 3, 4), (2, 2, 4)], False),
        ("#n", [(1,), (4,), (1,), (4,)], True),
        ("#n", [(4,), (3,)], False),
        ("n n+1", [(2, 3)], True),
        ("n n+1", [(2, 2)], False),
        ("n-1 n", [(2, 3)], True),
        ("n max(n,3)", [(2, 3), (2, 3)], True),
        ("n 2*n//3", [(3, 2)], True),
        ("#n n #n*2", [(1, 3, 1)], True),
        ("#n n #n*2", [(1, 3, 6)], True),
        ("#n n #n*2", [(1, 3, 5)], False),
    ],
)
def test_shapes(text, shapes, verdict):
    assert fits(Float[T, text], *shapes) is verdict


@pytest.mark.parametrize("kind", [Float, Float32, Int, Integer, Bool, Num, Shaped])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int64, torch.bool], ids=str
)
def test_dtypes(kind, dtype):
    assert fits(kind[T, "n"], (2,), dtype=dtype) is isinstance(torch.ones(2, dtype=dtype), kind[T, "n"])


class Model(nn.Module):
    hidden = 4

    @tensorcheck
    def forward(
        self,
        x: Tensor[float32_t, ("batch", Dim.hidden)],
        y: Float[T, "batch {self.hidden}*2"],
        size: int = 3,
        z: Float[T, "{size} hidden"] | None = None,
    ) -> Float[T, "batch {self.hidden}"]:
        return x


def test_both_kinds_in_one_signature():
    model, x, y = Model(), torch.ones(2, 4), torch.ones(2, 8)
    model(x, y)
    model(x, y, z=torch.ones(3, 1))
    model(x, y, 5, torch.ones(5, 1))
    for wrong in (torch.ones(3, 8), torch.ones(2, 4)):
        with pytest.raises(DimensionMismatchError) as caught:
            model(x, wrong)
        assert caught.value.parameter == "y"
    with pytest.raises(DimensionMismatchError):
        model(x, y, 5, torch.ones(3, 1))


def test_a_formula_may_come_before_the_names_it_uses():
    @tensorcheck
    def f(shifted: Float[T, "seq-1"], x: Tensor[float32_t, ("seq",)]) -> None: ...

    f(torch.ones(2), torch.ones(3))
    with pytest.raises(DimensionMismatchError) as caught:
        f(torch.ones(3), torch.ones(3))
    assert caught.value.parameter == "shifted"


def test_a_formula_over_what_was_left_out_says_nothing():
    @tensorcheck
    def f(shifted: Float[T, "seq-1"], x: Tensor[float32_t, ("seq",)] | None = None) -> None: ...

    f(torch.ones(7))


def test_nested_annotations():
    Image = Float[T, "channels height width"]
    assert fits(Float[Image, "batch"], (1, 2, 3, 4), (1, 2, 3, 4))
    assert not fits(Float[Image, "batch"], (2, 3, 4))


def test_unions_of_arrays():
    @tensorcheck
    def f(x: Float[T | np.ndarray, "n"], y: Float[np.ndarray, "n"], z: Float[T, "n"] | None = None) -> None: ...

    f(torch.ones(3), np.ones(4))
    f(np.ones(3), "numpy is not ours to check")
    with pytest.raises(InvalidParameterError):
        f([1.0], np.ones(3))
    with pytest.raises(DTypeMismatchError):
        f(torch.ones(3, dtype=torch.int64), np.ones(3))


def test_under_compile(compiled):
    assert compiled(Model())(torch.ones(2, 4), torch.ones(2, 8)).shape == (2, 4)
