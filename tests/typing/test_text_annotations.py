"""Annotations that are text: written so, or made so by `from __future__ import annotations`."""

from __future__ import annotations

import dataclasses
import warnings
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
from jaxtyping import Float
from torch import nn

from torchguard import AnnotationError, DimensionMismatchError, DTypeMismatchError, set_config, tensorcheck
from torchguard._channel.config import ErrorConfig
from torchguard.exceptions import ValidationWarning
from torchguard.typing import Dim, Tensor, bool_t, float32_t

if TYPE_CHECKING:
    from torchguard.somewhere import NotThere  # pyright: ignore[reportMissingImports]

Rows = Tensor[float32_t, ("batch", 3)]


class Pair(NamedTuple):
    x: Rows
    y: Tensor[bool_t, ("batch",)] | None = None


@dataclasses.dataclass
class Tree:
    x: Rows
    children: list[Tree] = dataclasses.field(default_factory=list)


class Model(nn.Module):
    width = 3

    @tensorcheck
    def forward(self, x: Tensor[float32_t, ("batch", Dim.width)], y: Float[torch.Tensor, "batch {self.width}"]) -> Rows:
        return x

    @tensorcheck
    def pairs(self, pair: Pair, later: Later | None = None) -> tuple[Rows, ...]:
        return (pair.x,)

    @tensorcheck
    def like(self, other: Model, x: Rows) -> Model:
        return other


@dataclasses.dataclass
class Later:
    z: Rows


def test_methods():
    Model()(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(DimensionMismatchError):
        Model()(torch.ones(2, 4), torch.ones(2, 3))
    with pytest.raises(DimensionMismatchError):
        Model()(torch.ones(2, 3), torch.ones(1, 3))


def test_classes_and_what_is_defined_later():
    x = torch.ones(2, 3)
    Model().pairs(Pair(x), Later(x))
    with pytest.raises(DTypeMismatchError):
        Model().pairs(Pair(x, torch.ones(2)))
    with pytest.raises(DimensionMismatchError) as caught:
        Model().pairs(Pair(x), Later(torch.ones(2, 4)))
    assert caught.value.parameter == "later.z"


def test_a_class_that_holds_itself():
    @tensorcheck
    def f(tree: Tree) -> None: ...

    f(Tree(torch.ones(2, 3), [Tree(torch.ones(2, 3))]))
    with pytest.raises(DimensionMismatchError):
        f(Tree(torch.ones(2, 3), [Tree(torch.ones(1, 3))]))


def test_the_class_itself():
    model = Model()
    assert model.like(model, torch.ones(2, 3)) is model


def test_names_of_the_place_of_definition():
    size = 5
    Five = Tensor[float32_t, (size,)]

    class Local(nn.Module):
        @tensorcheck
        def forward(self, x: Five, y: Tensor[float32_t, (size, size)]) -> None: ...

    Local()(torch.ones(5), torch.ones(5, 5))
    with pytest.raises(DimensionMismatchError):
        Local()(torch.ones(4), torch.ones(5, 5))


def test_under_compile(compiled):
    model = Model()
    assert compiled(model)(torch.ones(2, 3), torch.ones(2, 3)).shape == (2, 3)
    assert compiled(model.pairs)(Pair(torch.ones(2, 3)))[0].shape == (2, 3)


def test_what_is_not_there_when_the_program_runs_is_not_validated_and_says_so():
    @tensorcheck
    def f(x: Rows, config: NotThere) -> None: ...

    with pytest.warns(ValidationWarning, match="f: config: 'NotThere' cannot be resolved.* It is not validated"):
        f(torch.ones(2, 3), None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        f(torch.ones(2, 3), None)
    with pytest.raises(DimensionMismatchError):
        f(torch.ones(2, 4), None)


def test_under_strict_validation_it_is_an_error():
    set_config(ErrorConfig(strict_validation=True))

    @tensorcheck
    def f(x: Rows, config: NotThere) -> None: ...

    with pytest.raises(AnnotationError, match="f: config: 'NotThere' cannot be resolved"):
        f(torch.ones(2, 3), None)


def test_a_field_that_names_no_dtype():
    @dataclasses.dataclass
    class Wrong:
        x: Tensor[float23_t, ("n",)]  # pyright: ignore[reportUndefinedVariable]

    with pytest.raises(AnnotationError, match=r"f: wrong: .*Wrong.x: .*float23_t"):

        @tensorcheck
        def f(wrong: Wrong) -> None: ...


WIDTH = 16


def _make():
    @tensorcheck
    def f(x: Tensor[float32_t, ("batch", WIDTH)]) -> None: ...

    return f


def test_names_of_whoever_calls_are_not_looked_at():
    WIDTH = 32  # noqa: F841
    _make()(torch.ones(2, 16))


def test_what_the_place_of_definition_held_is_let_go():
    import gc
    import weakref

    class Big:
        pass

    def define():
        big, size = Big(), 3

        @tensorcheck
        def f(x: Tensor[float32_t, (size,)], other: NotThere) -> None: ...

        return f, weakref.ref(big)

    f, big = define()
    gc.collect()
    assert big() is None
    with pytest.warns(ValidationWarning):
        f(torch.ones(3), None)


def test_first_calls_from_many_threads():
    import threading

    size = 3
    wrong: list[Exception] = []

    def call(f, start):
        start.wait()
        for shape, fits in (((2, 3), True), ((2, 4), False)):
            try:
                f(torch.ones(shape), None)
                if not fits:
                    wrong.append(AssertionError("passed"))
            except DimensionMismatchError as error:
                if fits:
                    wrong.append(error)
            except AnnotationError as error:
                wrong.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(20):

            @tensorcheck
            def f(x: Tensor[float32_t, ("batch", size)], other: NotThere) -> None: ...

            start = threading.Barrier(4)
            threads = [threading.Thread(target=call, args=(f, start)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert not wrong


def test_text_that_cannot_be_looked_up_does_not_stop_a_graph(compiled):
    @tensorcheck
    def f(x: Rows, other: NotThere) -> Tensor[float23_t, ("batch",)]:  # pyright: ignore[reportUndefinedVariable]
        return x + 1

    assert compiled(f)(torch.ones(2, 3), None).shape == (2, 3)


def test_tensors_beside_what_is_not_there():
    @tensorcheck
    def f(x: tuple[torch.Tensor, NotThere], n: size_t) -> Rows:  # pyright: ignore[reportUndefinedVariable]
        return x[0]

    with pytest.warns(ValidationWarning):
        f((torch.ones(2, 3), None), 3)
