"""What the errors say: what, where, what was got, and what to do."""

from typing import Any, NamedTuple

import pytest
import torch
from jaxtyping import Float

from torchguard import ValidationError, tensorcheck
from torchguard.typing import Broadcast, Dim, Tensor, bool_t, float32_t


def message(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


class Encoder:
    hidden = 64

    @tensorcheck
    def forward(
        self,
        x: Tensor[float32_t, ("batch", "seq", Dim.hidden)],
        mask: Tensor[bool_t, ("batch", "seq")],
        bias: Tensor[float32_t, (Broadcast, Dim.hidden)] | None = None,
    ) -> Tensor[float32_t, ("batch", "seq", Dim.hidden * 4)]:
        return x


X = torch.ones(8, 16, 64)
MASK = torch.ones(8, 16, dtype=torch.bool)


def test_declared_and_found_side_by_side():
    assert message(Encoder().forward, X, MASK[:, :12]) == (
        "Encoder.forward: mask has the wrong shape.\n"
        "\n"
        "  mask: Tensor[bool_t, ('batch', 'seq')]\n"
        "    declared  (batch, seq)\n"
        "    expected  (    8,  16)\n"
        "    found     (    8,  12)\n"
        "                       ^^\n"
        "\n"
        "  batch = 8 (dim 0 of x), seq = 16 (dim 1 of x)"
    )


def test_every_argument_that_does_not_fit_the_first_one_first():
    assert message(Encoder().forward, X[0], MASK.float(), torch.ones(3, 63)) == (
        "Encoder.forward: x has the wrong shape.\n"
        "\n"
        "  x: Tensor[float32_t, ('batch', 'seq', Dim.hidden)]\n"
        "    declared  (batch, seq, Dim.hidden)  3 dims\n"
        "    found     (16, 64)                  2 dims\n"
        "              ^^^^^^^^\n"
        "\n"
        "  2 more do not fit:\n"
        "\n"
        "  mask: Tensor[bool_t, ('batch', 'seq')]\n"
        "    declared  bool_t\n"
        "    found     torch.float32\n"
        "  bias: Tensor[float32_t, (Broadcast, Dim.hidden)] | None\n"
        "    declared  (   Broadcast, Dim.hidden)\n"
        "    expected  (1 or 8 or 16,         64)\n"
        "    found     (           3,         63)\n"
        "                          ^          ^^\n"
        "\n"
        "  batch = 8 (dim 0 of mask), seq = 16 (dim 1 of mask)"
    )


def test_the_return():
    assert message(Encoder().forward, X, MASK) == (
        "Encoder.forward: return has the wrong shape.\n"
        "\n"
        "  return: Tensor[float32_t, ('batch', 'seq', Dim.hidden * 4)]\n"
        "    declared  (batch, seq, Dim.hidden * 4)\n"
        "    expected  (    8,  16,            256)\n"
        "    found     (    8,  16,             64)\n"
        "                                       ^^\n"
        "\n"
        "  batch = 8 (dim 0 of x), seq = 16 (dim 1 of x)"
    )


def test_a_tensor_that_does_not_fit_binds_no_names():
    assert message(Encoder().forward, X.transpose(1, 2), MASK) == (
        "Encoder.forward: x has the wrong shape.\n"
        "\n"
        "  x: Tensor[float32_t, ('batch', 'seq', Dim.hidden)]\n"
        "    declared  (batch, seq, Dim.hidden)\n"
        "    expected  (    8,  16,         64)\n"
        "    found     (    8,  64,         16)\n"
        "                       ^^          ^^\n"
        "    .transpose(1, 2) would match.\n"
        "\n"
        "  batch = 8 (dim 0 of mask), seq = 16 (dim 1 of mask)"
    )


def test_a_name_that_contradicts_itself():
    @tensorcheck
    def f(x: Tensor[float32_t, ("n", "n")]) -> None: ...

    told = "declared  (n, n)\n    expected  (2, 2)\n    found     (2, 3)\n                  ^"
    assert told in message(f, torch.ones(2, 3))


def test_a_dim_that_is_missing():
    @tensorcheck
    def f(x: Tensor[float32_t, ("batch", 3)]) -> None: ...

    assert ".unsqueeze(0) would match." in message(f, torch.ones(3))
    assert ".squeeze(0) would match." in message(f, torch.ones(1, 2, 3))


def test_an_ellipsis_stands_for_what_it_covers():
    @tensorcheck
    def f(x: Tensor[float32_t, ("batch", ..., 3)]) -> None: ...

    told = message(f, torch.ones(2, 4, 5, 6))
    assert "declared  (batch,  ..., 3)\n    expected  (    2,  ..., 3)\n    found     (    2, 4, 5, 6)" in told
    assert "at least 2 dims" in message(f, torch.ones(3))


def test_a_device():
    @tensorcheck
    def f(x: Tensor[float32_t, ("n",), "cpu"]) -> None: ...

    told = message(f, torch.ones(3, device="meta"))
    assert "x is on the wrong device" in told
    assert "declared  cpu\n    found     meta" in told


def test_a_gradient():
    @tensorcheck
    def f(x: Tensor[float32_t, ("n",), None, True]) -> None: ...

    told = "declared  requires_grad=True\n    found     requires_grad=False\n    .requires_grad_() would match."
    assert told in message(f, torch.ones(3))


def test_something_else_than_a_tensor():
    @tensorcheck
    def f(x: Tensor[float32_t, ("n",)]) -> None: ...

    assert message(f, [1.0]) == (
        "test_something_else_than_a_tensor.<locals>.f: x is not what was declared.\n"
        "\n"
        "  x\n"
        "    declared  Tensor[float32_t, ('n',)]\n"
        "    found     a list\n"
        "    Give a torch.Tensor."
    )


def test_a_part_of_an_argument_goes_by_its_path():
    class Pair(NamedTuple):
        x: Tensor[float32_t, ("n",)]
        y: Tensor[float32_t, ("n",)]

    @tensorcheck
    def f(pairs: list[Pair]) -> None: ...

    told = message(f, [Pair(torch.ones(2), torch.ones(2)), Pair(torch.ones(2), torch.ones(3))])
    assert "pairs[1].y has the wrong shape" in told
    assert "n = 2 (dim 0 of pairs[0].x)" in told


def test_jaxtyping_is_shown_as_it_was_written():
    @tensorcheck
    def f(x: Float[torch.Tensor, "*batch n"], y: Float[torch.Tensor, "*batch #n n+1"]) -> None: ...

    assert message(f, torch.ones(2, 3, 4), torch.ones(2, 4, 5)) == (
        "test_jaxtyping_is_shown_as_it_was_written.<locals>.f: y has the wrong shape.\n"
        "\n"
        '  y: Float[Tensor, "*batch #n n+1"]\n'
        "    declared  (*batch,     #n, n+1)\n"
        "    expected  (  2, 3, 1 or 4,   5)\n"
        "    found     (     2,      4,   5)\n"
        "                    ^\n"
        "\n"
        "  n = 4 (dim 2 of x), *batch = (2, 3) (in x)"
    )


def test_advice_is_given_where_one_change_fits():
    @tensorcheck
    def image(x: Tensor[float32_t, ("batch", 3, "height", "width")]) -> None: ...

    @tensorcheck
    def three(x: Tensor[float32_t, ("a", "b", "c")]) -> None: ...

    assert ".movedim(3, 1) would match." in message(image, torch.ones(2, 32, 64, 3))
    assert "would match" not in message(three, torch.ones(8, 64))  # any dim could be the missing one
    assert "would match" not in message(image, torch.ones(2, 4, 32, 64))


def test_a_cast_is_advised_between_numbers_of_a_kind():
    @tensorcheck
    def f(x: Tensor[float32_t, ("n",)], b: Tensor[bool_t, ("n",)]) -> None: ...

    assert ".to(torch.float32) would match." in message(f, torch.ones(2).double(), torch.ones(2) > 0)
    assert "would match" not in message(f, torch.ones(2, dtype=torch.complex64), torch.ones(2) > 0)
    assert "would match" not in message(f, torch.ones(2), torch.ones(2))


def test_grammar():
    @tensorcheck
    def f(x: Tensor[float32_t, ("n",)], y: Tensor[float32_t, ("n", ..., 3)] | None = None) -> None: ...

    assert "found     an int" in message(f, 3)
    assert "found     None" in message(f, None)
    assert "(n,)    1 dim\n" in message(f, torch.ones(2, 2))
    assert "found     (2, none, 4)" in message(f, torch.ones(2), torch.ones(2, 4))


def test_a_tensor_that_fitted_when_it_was_met_bound_its_names():
    @tensorcheck
    def f(x: Float[torch.Tensor, "n m+1"], m: Float[torch.Tensor, "m"]) -> None: ...

    assert message(f, torch.ones(2, 3), torch.ones(3)).endswith("n = 2 (dim 0 of x), m = 3 (dim 0 of m)")
