"""`@tensorcheck` holds functions to their annotations."""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Collection
from typing import Any, Generic, Literal, NamedTuple, NotRequired, Protocol, TypedDict, TypeVar

import pytest
import torch
from torch import nn

from torchguard import (
    DeviceMismatchError,
    DimensionMismatchError,
    DTypeMismatchError,
    Err,
    InvalidParameterError,
    InvalidReturnTypeError,
    Ok,
    Result,
    TorchGuardError,
    TypeMismatchError,
    ValidationError,
    err,
    tensorcheck,
    tracked,
)
from torchguard.typing import (
    Broadcast,
    Dim,
    Tensor,
    bool_t,
    error_t,
    float32_t,
    float64_t,
    int64_t,
)

Rows = Tensor[float32_t, ("batch", "features")]
Mask = Tensor[bool_t, ("batch",)]


@tensorcheck
def masked(x: Rows, mask: Mask) -> Rows:
    return x * mask[:, None]


def test_what_fits_passes():
    x = torch.ones(3, 4)
    assert torch.equal(masked(x, torch.ones(3, dtype=torch.bool)), x)


def test_a_name_has_one_size_in_all_arguments():
    with pytest.raises(DimensionMismatchError):
        masked(torch.ones(3, 4), torch.ones(2, dtype=torch.bool))


def test_a_name_has_the_same_size_in_the_return():
    @tensorcheck
    def half(x: Rows) -> Rows:
        return x[::2]

    with pytest.raises(DimensionMismatchError) as caught:
        half(torch.ones(4, 2))
    assert caught.value.parameter == "return"


def test_a_name_is_free_again_in_the_next_call():
    for batch in (2, 3, 2):
        masked(torch.ones(batch, 4), torch.ones(batch, dtype=torch.bool))


def test_sizes_ranks_and_ellipsis():
    @tensorcheck
    def f(x: Tensor[float32_t, (..., "seq", 4)]) -> Tensor[float32_t, ("seq", ..., 4)]:
        return x.movedim(-2, 0)

    for shape in [(3, 4), (2, 3, 4), (5, 2, 3, 4)]:
        f(torch.ones(shape))
    for shape in [(4,), (3, 5), ()]:
        with pytest.raises(DimensionMismatchError):
            f(torch.ones(shape))


def test_a_scalar_and_any_shape():
    @tensorcheck
    def f(x: Tensor[float32_t, ...], y: float32_t) -> Tensor[float32_t, ()]:
        return (x.sum() + y.sum()).float()

    f(torch.ones(2, 3), torch.ones(4))
    with pytest.raises(DTypeMismatchError):
        f(torch.ones(2, 3), torch.ones(4, dtype=torch.float64))


def test_dtype():
    with pytest.raises(DTypeMismatchError):
        masked(torch.ones(3, 4, dtype=torch.float64), torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize("declared", ["cpu", torch.device("cpu"), None])
def test_device(declared):
    @tensorcheck
    def f(x: Tensor[float32_t, ("n",), declared]) -> None: ...

    f(torch.ones(2))
    if declared is not None:
        with pytest.raises(DeviceMismatchError):
            f(torch.ones(2, device="meta"))


def test_requires_grad():
    @tensorcheck
    def f(w: Tensor[float32_t, ("n",), None, True], x: Tensor[float32_t, ("n",), None, False]) -> None: ...

    f(torch.ones(2, requires_grad=True), torch.ones(2))
    with pytest.raises(InvalidParameterError):
        f(torch.ones(2), torch.ones(2))
    with pytest.raises(InvalidParameterError):
        f(torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True))


def test_nothing_that_is_computed_requires_a_gradient_without_grad_mode():
    @tensorcheck
    def double(x: Tensor[float32_t, ("n",)]) -> Tensor[float32_t, ("n",), None, True]:
        return 2 * x

    x = torch.ones(2, requires_grad=True)
    double(x)
    with torch.no_grad():
        double(x)
    with pytest.raises(TypeMismatchError):
        double(torch.ones(2))


class Config(NamedTuple):
    heads: int = 6


class Encoder(nn.Module):
    def __init__(self, hidden: int = 4):
        super().__init__()
        self.hidden = hidden
        self.config = Config()
        self.sizes = [hidden, 2]
        self.up = nn.Linear(hidden, 4 * hidden)

    @tensorcheck
    def forward(
        self, x: Tensor[float32_t, ("batch", "seq", Dim.hidden)], bias: Tensor[float32_t, (Broadcast, Dim.hidden)]
    ) -> Tensor[float32_t, ("batch", "seq", Dim.hidden * 4)]:
        return self.up(x + bias)

    @tensorcheck
    def computed(
        self, x: Tensor[float32_t, (Dim.config.heads // 2, 1 + Dim.sizes[0], Dim.up.in_features - Dim.sizes[1])]
    ) -> None: ...


def test_sizes_read_off_the_module():
    encoder = Encoder()
    assert encoder(torch.ones(2, 3, 4), torch.ones(1, 4)).shape == (2, 3, 16)
    encoder.computed(torch.ones(3, 5, 2))
    with pytest.raises(DimensionMismatchError):
        encoder(torch.ones(2, 3, 5), torch.ones(1, 4))
    with pytest.raises(DimensionMismatchError):
        encoder.computed(torch.ones(3, 5, 3))


def test_a_broadcast_dim_fits_what_it_broadcasts_against():
    encoder, x = Encoder(), torch.ones(2, 3, 4)
    for size in (1, 3):
        encoder(x, torch.ones(size, 4))
    with pytest.raises(DimensionMismatchError) as caught:
        encoder(x, torch.ones(2, 4))
    assert caught.value.parameter == "bias"


def test_keywords_defaults_and_none():
    @tensorcheck
    def f(x: Rows, mask: Mask = None, *, scale: Tensor[float32_t, ("features",)] | None = None) -> Rows:
        return x

    x, wrong = torch.ones(3, 4), torch.ones(5)
    f(x)
    f(x=x, mask=None, scale=None)
    f(x, scale=torch.ones(4))
    with pytest.raises(DTypeMismatchError):
        f(x, wrong)
    with pytest.raises(DTypeMismatchError):
        f(mask=wrong, x=x)
    with pytest.raises(DimensionMismatchError):
        f(x, scale=wrong)


def test_an_argument_that_may_not_be_none():
    with pytest.raises(InvalidParameterError):
        masked(torch.ones(3, 4), None)


def test_python_s_own_errors_stay_python_s():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'mask'"):
        masked(torch.ones(3, 4))
    with pytest.raises(TypeError, match="unexpected keyword argument 'nope'"):
        masked(torch.ones(3, 4), torch.ones(3, dtype=torch.bool), nope=1)


def test_collected_arguments():
    @tensorcheck
    def f(*parts: Rows, **named: Mask) -> None: ...

    f(torch.ones(2, 3), torch.ones(2, 3), mask=torch.ones(2, dtype=torch.bool))
    with pytest.raises(DimensionMismatchError) as caught:
        f(torch.ones(2, 3), torch.ones(2, 4))
    assert caught.value.parameter == "parts[1]"
    with pytest.raises(DTypeMismatchError) as caught:
        f(torch.ones(2, 3), mask=torch.ones(2))
    assert caught.value.parameter == "mask"


def test_positional_only():
    @tensorcheck
    def f(x: Rows, /, **x_too: Any) -> None: ...

    f(torch.ones(2, 3), x="not the tensor")
    with pytest.raises(DimensionMismatchError) as caught:
        f(torch.ones(2))
    assert caught.value.parameter == "x"


class Pair(NamedTuple):
    x: Rows
    mask: Mask | None = None


@dataclasses.dataclass
class Batch:
    x: Rows
    masks: dict[str, Mask]
    name: str = "train"


class Keys(TypedDict):
    x: Rows
    mask: NotRequired[Mask]


def test_named_tuples():
    @tensorcheck
    def f(pair: Pair) -> Pair:
        return Pair(pair.x, torch.ones(pair.x.shape[0], dtype=torch.bool))

    f(Pair(torch.ones(2, 3)))
    with pytest.raises(DTypeMismatchError) as caught:
        f(Pair(torch.ones(2, 3), torch.ones(2)))
    assert caught.value.parameter == "pair.mask"
    with pytest.raises(InvalidParameterError):
        f((torch.ones(2, 3), None))


def test_dataclasses():
    @tensorcheck
    def f(batch: Batch) -> Rows:
        return batch.x

    f(Batch(torch.ones(2, 3), {"a": torch.ones(2, dtype=torch.bool)}))
    with pytest.raises(DimensionMismatchError) as caught:
        f(Batch(torch.ones(2, 3), {"a": torch.ones(2, dtype=torch.bool), "b": torch.ones(3, dtype=torch.bool)}))
    assert caught.value.parameter == "batch.masks['b']"


def test_typed_dicts():
    @tensorcheck
    def f(batch: Keys) -> None: ...

    f({"x": torch.ones(2, 3)})
    with pytest.raises(InvalidParameterError, match="a dict without 'x'"):
        f({"mask": torch.ones(2, dtype=torch.bool)})
    with pytest.raises(DTypeMismatchError):
        f({"x": torch.ones(2, 3), "mask": torch.ones(2)})


def test_a_dataclass_that_holds_itself():
    @tensorcheck
    def f(tree: Tree) -> None: ...

    leaf = Tree(torch.ones(2, 3), [])
    f(Tree(torch.ones(2, 3), [leaf, leaf]))
    with pytest.raises(DimensionMismatchError) as caught:
        f(Tree(torch.ones(2, 3), [leaf, Tree(torch.ones(2, 4), [])]))
    assert caught.value.parameter == "tree.children[1].x"


@dataclasses.dataclass
class Tree:
    x: Rows
    children: "list[Tree]"


def test_nested_tuples_lists_and_dicts():
    Nested = tuple[Rows, tuple[Mask, dict[str, list[Rows]]]]

    @tensorcheck
    def f(nested: Nested) -> Nested:
        return nested

    x, mask = torch.ones(2, 3), torch.ones(2, dtype=torch.bool)
    f((x, (mask, {"a": [x, x], "b": []})))
    with pytest.raises(DimensionMismatchError) as caught:
        f((x, (mask, {"a": [x, torch.ones(2, 4)]})))
    assert caught.value.parameter == "nested[1][1]['a'][1]"
    with pytest.raises(InvalidParameterError, match="a tuple of 2"):
        f((x, (mask,)))


def test_variable_tuples():
    @tensorcheck
    def f(xs: tuple[Rows, ...]) -> list[Rows]:
        return list(xs)

    assert len(f((torch.ones(2, 3),) * 3)) == 3
    with pytest.raises(DimensionMismatchError):
        f((torch.ones(2, 3), torch.ones(3, 3)))


def test_unions():
    @tensorcheck
    def f(x: Rows | Tensor[float32_t, ("features",)] | float, mode: Literal["a"] | Mask = "a") -> Rows | None:
        return x if isinstance(x, torch.Tensor) and x.ndim == 2 else None

    f(torch.ones(2, 3))
    f(torch.ones(3))
    f(1.0, "a")
    f(1.0, torch.ones(2, dtype=torch.bool))
    with pytest.raises(DimensionMismatchError):
        f(torch.ones(1, 2, 3))
    with pytest.raises(InvalidParameterError):
        f("text")
    with pytest.raises(DTypeMismatchError):
        f(1.0, torch.ones(2))


def test_a_union_that_does_not_fit_binds_nothing():
    @tensorcheck
    def f(x: Tensor[float32_t, ("n", 7)] | Tensor[float32_t, ("m", "n")], y: Tensor[float32_t, ("n",)]) -> None: ...

    f(torch.ones(2, 3), torch.ones(3))


def test_results():
    @tensorcheck
    def f(x: Rows) -> Result[Rows, str]:
        return Ok(x) if x.sum() > 0 else Err("empty") if x.sum() == 0 else x

    assert f(torch.ones(2, 3)).is_ok()
    assert f(torch.zeros(2, 3)).is_err()
    with pytest.raises(InvalidReturnTypeError):
        f(-torch.ones(2, 3))


T = TypeVar("T")


@dataclasses.dataclass
class Box(Generic[T]):
    content: T


def test_generic_classes():
    @tensorcheck
    def f(box: Box[Rows], other: Box[int]) -> None: ...

    f(Box(torch.ones(2, 3)), Box(1))
    with pytest.raises(DimensionMismatchError):
        f(Box(torch.ones(2)), Box(1))


def test_what_is_returned_has_to_be_there():
    @tensorcheck
    def f(x: Rows, give: Any) -> tuple[Rows, Mask]:
        return give

    x, mask = torch.ones(2, 3), torch.ones(2, dtype=torch.bool)
    f(x, (x, mask))
    with pytest.raises(InvalidReturnTypeError):
        f(x, x)
    with pytest.raises(InvalidReturnTypeError):
        f(x, (x, mask, mask))
    with pytest.raises(TypeMismatchError):
        f(x, (x, None))


def test_inheritance():
    class Base(nn.Module):
        width = 3

        @tensorcheck
        def forward(self, x: Tensor[float32_t, ("batch", Dim.width)]) -> Tensor[float32_t, ("batch", Dim.width)]:
            return x + 1

    class Wide(Base):
        width = 5

        @tensorcheck
        def forward(self, x: Tensor[float64_t, ("batch", Dim.width)]) -> Tensor[float32_t, ("batch", Dim.width)]:
            return super().forward(x.float()) * 2

    class Same(Base):
        pass

    assert torch.equal(Wide()(torch.ones(2, 5, dtype=torch.float64)), torch.full((2, 5), 4.0))
    assert torch.equal(Same()(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    with pytest.raises(DTypeMismatchError):
        Wide()(torch.ones(2, 5))
    with pytest.raises(DimensionMismatchError):
        Same()(torch.ones(2, 5))


def test_class_and_static_methods():
    class Model:
        width = 3

        @classmethod
        @tensorcheck
        def inner(cls, x: Tensor[float32_t, (Dim.width,)]) -> None: ...

        @tensorcheck
        @classmethod
        def outer(cls, x: Tensor[float32_t, (Dim.width,)]) -> None: ...

        @tensorcheck
        @staticmethod
        def static(x: Tensor[float32_t, (3,)]) -> None: ...

    for method in (Model.inner, Model.outer, Model.static, Model().inner, Model().outer, Model().static):
        method(torch.ones(3))
        with pytest.raises(DimensionMismatchError):
            method(torch.ones(4))


def test_dtype_aliases_that_stand_for_flags():
    @tensorcheck(auto_detect=False)
    def f(x: Rows, f: Tensor[error_t, ("batch", "words")]) -> Tensor[error_t, ("batch", "words")]:
        return f

    x = torch.ones(3, 4)
    for dtype in (torch.int64, torch.int32, torch.float32, torch.float64):
        f(x, err.new(x).to(dtype))
    with pytest.raises(DTypeMismatchError):
        f(x, err.new(x).to(torch.int16))
    with pytest.raises(DimensionMismatchError):
        f(x, err.new(x[:2]))


def test_the_decorated_function_looks_like_itself():
    import inspect

    assert masked.__name__ == "masked"
    assert list(inspect.signature(masked).parameters) == ["x", "mask"]


def test_a_function_without_tensors_is_left_alone():
    def f(x: int) -> int:
        return x

    assert tensorcheck(auto_detect=False)(f) is f


def test_annotations_of_others_are_not_looked_at():
    @tensorcheck
    def f(x: torch.Tensor, n: int, name: str = "") -> torch.Tensor:
        return x

    assert f("anything", n="goes") == "anything"


def test_every_error_is_what_a_caller_would_guess():
    for error, builtin in {
        DimensionMismatchError: ValueError,
        DTypeMismatchError: TypeError,
        DeviceMismatchError: ValueError,
        InvalidParameterError: TypeError,
        TypeMismatchError: TypeError,
        InvalidReturnTypeError: TypeError,
    }.items():
        assert issubclass(error, ValidationError)
        assert issubclass(error, TorchGuardError)
        assert issubclass(error, builtin)


def test_errors_survive_the_way_to_another_process():
    import pickle

    with pytest.raises(DimensionMismatchError) as caught:
        masked(torch.ones(3, 4), torch.ones(2, dtype=torch.bool))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.function, copy.parameter) == (str(caught.value), "masked", "mask")


def test_the_example_of_a_tracked_model():
    @tracked
    class MyModel(nn.Module):
        def __init__(self, in_features: int, out_features: int):
            super().__init__()
            self.in_features, self.out_features = in_features, out_features
            self.linear = nn.Linear(in_features, out_features)

        @tensorcheck
        def forward(
            self, x: Tensor[float32_t, ("batch", Dim.in_features)]
        ) -> tuple[Tensor[float32_t, ("batch", Dim.out_features)], Tensor[error_t, ("batch", "num_words")]]:
            return self.linear(x), err.new(x)

    out, f = MyModel(3, 2)(torch.ones(4, 3))
    assert out.shape == (4, 2)
    assert err.is_ok(f).all()


def test_indices():
    @tensorcheck
    def take(table: Tensor[float32_t, ("rows", "d")], ids: Tensor[int64_t, ("n",)]) -> Tensor[float32_t, ("n", "d")]:
        return table[ids]

    take(torch.ones(5, 2), torch.tensor([0, 4]))
    with pytest.raises(DTypeMismatchError):
        take(torch.ones(5, 2), torch.tensor([0.0]))


def test_sets_deques_and_other_mappings():
    @tensorcheck
    def f(a: set[Mask], b: deque[Mask], c: defaultdict[str, Mask], d: Collection[Mask]) -> None: ...

    mask, wrong = torch.ones(2, dtype=torch.bool), torch.ones(2)
    f({mask}, deque([mask]), defaultdict(None, {"a": mask}), {"a": mask}.values())
    for given in (
        ({wrong}, deque(), {}, []),
        (set(), deque([wrong]), {}, []),
        (set(), deque(), {"a": wrong}, []),
        (set(), deque(), {}, {"a": wrong}.values()),
    ):
        with pytest.raises(DTypeMismatchError):
            f(*given)


def test_unions_with_numbers_protocols_and_typed_dicts():
    class Sized(Protocol):
        def __len__(self) -> int: ...

    @tensorcheck
    def f(x: Rows | float, y: Rows | Sized = "", z: Rows | Keys | None = None) -> None: ...

    f(2)
    f(2.0, "text", {"x": torch.ones(2, 3)})
    with pytest.raises(InvalidParameterError):
        f("text")
    with pytest.raises(DimensionMismatchError):
        f(1.0, z=torch.ones(2))


def test_a_literal_is_one_of_its_values():
    @tensorcheck
    def f(mode: Literal["a", "b"] | Mask) -> None: ...

    f("b")
    with pytest.raises(InvalidParameterError):
        f("c")


def test_a_field_that_was_never_set():
    @dataclasses.dataclass
    class Lazy:
        x: Rows
        y: Rows = dataclasses.field(init=False)

    @tensorcheck
    def f(lazy: Lazy) -> None: ...

    f(Lazy(torch.ones(2, 3)))


def test_self_given_by_name():
    Encoder.forward(self=Encoder(), x=torch.ones(2, 3, 4), bias=torch.ones(1, 4))


def test_a_type_variable_with_a_bound():
    S = TypeVar("S", bound=Rows)

    @tensorcheck
    def f(x: S) -> S:
        return x

    with pytest.raises(DimensionMismatchError):
        f(torch.ones(2))


def test_a_dim_without_a_name():
    @tensorcheck
    def f(x: Tensor[float32_t, ("_", "_")]) -> None: ...

    f(torch.ones(2, 3))
