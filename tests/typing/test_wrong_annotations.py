"""An annotation that makes no sense is refused where it is written, or at the first call, and is named."""

from collections.abc import Callable, Iterable, Iterator
from typing import Annotated

import pytest
import torch
from jaxtyping import Float
from torch import nn

from torchguard import AnnotationError, TorchGuardError, tensorcheck
from torchguard.typing import Broadcast, Dim, Tensor, error_t, float32_t, int64_t


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Tensor["float99", ("n",)], r"Tensor\['float99', \('n',\)\]: 'float99' is no dtype"),
        (lambda: Tensor[float, ("n",)], "is no dtype. Use an alias such as float32_t"),
        (lambda: Tensor[Tensor[float32_t, ("n",)], ("n",)], "is no dtype"),
        (lambda: Tensor[float32_t, (..., 3, ...)], r"Tensor\[float32_t, \(..., 3, ...\)\] has 2 ellipses"),
        (lambda: Tensor["batch", ("batch", 3)], "'batch' is no dtype"),
        (lambda: Tensor[float32_t, ("float32", 3)], "'float32' names a dtype and stands where a dim belongs"),
        (lambda: Tensor[float32_t, ("float32_t", 3)], "'float32_t' names a dtype"),
        (lambda: Tensor[float32_t, (float32_t, 3)], "float32_t is a dtype and stands where a dim belongs"),
        (lambda: Tensor[float32_t, (torch.float32, 3)], "torch.float32 is a dtype"),
        (lambda: Tensor[float32_t, "batch seq"], "the shape is 'batch seq'. Give a tuple of dims"),
        (lambda: Tensor[float32_t, 3], "the shape is 3. Give a tuple"),
        (lambda: Tensor[float32_t, ("batch seq",)], "'batch seq' is no name for a dim"),
        (lambda: Tensor[float32_t, (-1,)], "-1 is no dim"),
        (lambda: Tensor[float32_t, (True,)], "True is no dim"),
        (lambda: Tensor[float32_t, (2.0,)], "2.0 is no dim"),
        (lambda: Tensor[float32_t, (None,)], "None is no dim"),
        (lambda: Tensor[float32_t, ("n",), "gpu"], "the device is 'gpu'"),
        (lambda: Tensor[float32_t, ("n",), 3.5], "the device is 3.5"),
        (lambda: Tensor[float32_t, ("n",), None, "yes"], "requires_grad is 'yes'"),
        (lambda: Tensor[float32_t], "give a dtype and a shape"),
        (lambda: Tensor[float32_t, ("n",), None, None, None], "give a dtype and a shape"),
        (lambda: Tensor[float32_t, (Dim.hidden / 2,)], "Dim.hidden / 2 may not be a whole number. Divide with //"),
        (lambda: (Dim.hidden * 2).size, r"Dim.hidden \* 2 is a number: it has no 'size'"),
        (lambda: Tensor(3), "is for annotations. Make tensors with torch"),
        (lambda: float32_t(3), "float32_t is for annotations"),
    ],
)
def test_refused_where_it_is_written(make, told):
    with pytest.raises(AnnotationError, match=told) as caught:
        make()
    assert isinstance(caught.value, TorchGuardError)
    assert isinstance(caught.value, TypeError)


def test_reading_is_as_it_was_written():
    spec = Tensor[float32_t, ("n", 3, ..., Dim.a.b[0] * (2 + Dim.c) // 2, Broadcast), "cuda:0", True]
    assert repr(spec) == "Tensor[float32_t, ('n', 3, ..., (Dim.a.b[0] * (2 + Dim.c)) // 2, Broadcast), 'cuda:0', True]"
    assert repr(Tensor[torch.float32, ()]) == "Tensor[torch.float32, ()]"


def test_an_attribute_that_self_does_not_have():
    class Model(nn.Module):
        @tensorcheck
        def forward(self, x: Tensor[float32_t, ("n", Dim.hiden)]) -> None: ...

    told = r"Model.forward: x: Tensor\[float32_t, \('n', Dim.hiden\)\]: Dim.hiden cannot be read off a Model: .*hiden"
    with pytest.raises(AnnotationError, match=told):
        Model()(torch.ones(2, 3))


@pytest.mark.parametrize("hidden", ["3", 3.0, None, torch.ones(2)])
def test_an_attribute_that_is_no_size(hidden):
    class Model:
        def __init__(self):
            self.hidden = hidden

        @tensorcheck
        def forward(self, x: Tensor[float32_t, (Dim.hidden,)]) -> None: ...

    with pytest.raises(AnnotationError, match=r"forward: x: Tensor\[float32_t, \(Dim.hidden,\)\]: Dim.hidden"):
        Model().forward(torch.ones(3))


def test_a_size_that_cannot_be_computed():
    class Model:
        parts = 0

        @tensorcheck
        def forward(self, x: Tensor[float32_t, (8 // Dim.parts,)]) -> None: ...

    with pytest.raises(AnnotationError, match=r"8 // Dim.parts cannot be read off a Model"):
        Model().forward(torch.ones(3))


def test_a_function_has_no_self():
    with pytest.raises(AnnotationError, match=r"f: x: Tensor\[.*\]: Dim.hidden is read off the first parameter"):

        @tensorcheck
        def f(x: Tensor[float32_t, (Dim.hidden,)]) -> None: ...


def test_text_that_names_no_dtype():
    @tensorcheck
    def f(x: "Tensor[float23_t, ('n',)]") -> None: ...

    with pytest.raises(AnnotationError, match=r"f: x: \"Tensor\[float23_t, .*\" cannot be resolved.*float23_t"):
        f(torch.ones(3))


def test_text_that_makes_no_sense():
    with pytest.raises(AnnotationError, match=r"f: x: Tensor\[float32_t, \(..., ...\)\] has 2 ellipses"):

        @tensorcheck
        def f(x: "Tensor[float32_t, (..., ...)]") -> None: ...


def test_a_formula_over_a_name_that_nothing_binds():
    with pytest.raises(AnnotationError, match="nothing binds seq in 'seq-1'"):

        @tensorcheck
        def f(x: Float[torch.Tensor, "batch seq-1"]) -> None: ...


def test_a_formula_that_cannot_be_computed():
    class Model:
        @tensorcheck
        def forward(self, x: Float[torch.Tensor, "batch {self.hiden}"]) -> None: ...

    with pytest.raises(AnnotationError, match=r"Model.forward: x: Float\[Tensor, \"batch {self.hiden}\"\]: .*hiden"):
        Model().forward(torch.ones(2, 3))


def test_a_dim_of_a_pytree():
    with pytest.raises(AnnotationError, match=r"'\?n' is for the leaves of a PyTree"):

        @tensorcheck
        def f(x: Float[torch.Tensor, "?n"]) -> None: ...


def test_what_cannot_be_decorated():
    class Model(nn.Module):
        pass

    async def coroutine(x): ...

    for target in (Model, Model(), 3, torch.add, coroutine):
        with pytest.raises(AnnotationError, match="tensorcheck: "):
            tensorcheck(target)


@pytest.mark.parametrize("codes", [1, {5}, {"NAN"}, "NAN", 2.0])
def test_codes_that_cannot_be_detected(codes):
    with pytest.raises(TorchGuardError, match="auto_detect is"):
        tensorcheck(auto_detect=codes)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Tensor[int64_t, ("n",), None, True], "only floats and complex numbers can require a gradient"),
        (lambda: Tensor[error_t, ("n",)], "flags have two dims"),
        (lambda: Tensor[float32_t, (Dim,)], "Dim alone is no size"),
        (lambda: 2 / Dim.a, "may not be a whole number. Divide with //"),
        (lambda: -Dim.a, "-Dim.a is no size"),
        (lambda: Dim.a * 0.5, "Dim.a and 0.5 make no whole number"),
        (lambda: Dim.a(), "Dim.a cannot be called"),
        (lambda: float32_t["b"], r"write Tensor\[float32_t, \(...\)\]"),
    ],
)
def test_refused_as_well(make, told):
    with pytest.raises(AnnotationError, match=told):
        make()


Rows = Tensor[float32_t, ("n",)]


@pytest.mark.parametrize(
    "annotation", [(Rows, Rows), [Rows], {"a": Rows}, Annotated[torch.Tensor, Rows], tuple[Rows, *tuple[Rows, ...]]]
)
def test_a_tensor_declared_where_nobody_looks(annotation):
    def f(x) -> None: ...

    f.__annotations__["x"] = annotation
    with pytest.raises(AnnotationError, match=r"f: x: .* holds tensors in a way @tensorcheck does not look into"):
        tensorcheck(f)


@pytest.mark.parametrize("annotation", [Iterator[Rows], Iterable[Rows], Callable[[Rows], Rows], type[Rows]])
def test_what_comes_later_is_not_looked_at(annotation):
    @tensorcheck
    def f(x: annotation) -> None: ...

    f("anything")
