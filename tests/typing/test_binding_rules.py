"""Which shapes fit a signature, against a plain-Python model of it and against jaxtyping."""

import re
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from beartype import beartype
from hypothesis import event, given
from hypothesis import strategies as st
from jaxtyping import Float, TypeCheckError, jaxtyped

from torchguard.exceptions import DimensionMismatchError, DTypeMismatchError, ValidationError
from torchguard.typing import Broadcast, Dim, Tensor, bool_t, float32_t, int64_t, tensorcheck

PARAMETERS = ["w", "x", "y", "z"]
SIZES = st.integers(0, 5)
ALIASES = {torch.float32: float32_t, torch.int64: int64_t, torch.bool: bool_t}


class OfSelf(NamedTuple):
    """A dim in terms of `Dim`, as text: with an owner in the place of `Dim` it is the size."""

    text: str

    def on(self, owner):
        return eval(self.text, {"Dim": owner})


OF_SELF = [
    OfSelf(text)
    for text in (
        "Dim.hidden",
        "Dim.hidden * 4",
        "2 * Dim.hidden - 1",
        "Dim.heads // 2",
        "Dim.heads % 2",
        "5 - Dim.heads",
        "Dim.config.width + 1",
        "(Dim.hidden + Dim.heads) * Dim.config.width",
        "Dim.sizes[0]",
        "Dim.sizes[-1] ** 2",
    )
]
OWNERS = st.builds(
    lambda hidden, heads, width, sizes: SimpleNamespace(
        hidden=hidden, heads=heads, config=SimpleNamespace(width=width), sizes=sizes
    ),
    *(SIZES, SIZES, SIZES, st.lists(st.integers(0, 3), min_size=2, max_size=2)),
)
NAMES = st.sampled_from(["a", "b", "c"])
DIMS = st.one_of(NAMES, NAMES, SIZES, st.sampled_from(OF_SELF), st.just(Broadcast))


class Call(NamedTuple):
    """What is declared for each parameter and for the return, and the shapes they get."""

    owner: SimpleNamespace
    declared: dict
    shapes: dict


# The model


def failing(call):
    """What does not fit, in argument order. The return is looked at only if all arguments fit."""
    bound = {}
    arguments = [name for name in call.declared if name != "return"]
    for group, seen in ((arguments, arguments), (["return"], [*arguments, "return"])):
        wrong = {name for name in group if not fits(call, name, bound)}
        wrong |= {name for name in group if name not in wrong and not broadcasts(call, name, seen)}
        if wrong:
            return [name for name in group if name in wrong]
    return []


def fits(call, name, bound):
    """Whether a tensor fits, but for `Broadcast`. If it does, it binds the names that are met here first."""
    pairs = side_by_side(call.declared[name], call.shapes[name])
    met = dict(bound)
    if pairs is None or not all(dim_fits(dim, size, met, call.owner) for dim, size in pairs):
        return False
    bound.update(met)
    return True


def dim_fits(dim, size, bound, owner):
    if dim is ... or dim is Broadcast:
        return True
    if isinstance(dim, OfSelf):
        return size == dim.on(owner)
    if isinstance(dim, str):
        return size == bound.setdefault(dim, size)
    return size == dim


def broadcasts(call, name, seen):
    """Whether each `Broadcast` of a tensor goes with another tensor, counted from the right."""
    pairs = side_by_side(call.declared[name], call.shapes[name])
    others = [call.shapes[other] for other in seen if other != name]
    for place, (dim, size) in enumerate(reversed(pairs), start=1):
        there = [shape[-place] for shape in others if len(shape) >= place]
        if dim is Broadcast and not (size == 1 or not there or 1 in there or size in there):
            return False
    return True


def side_by_side(dims, shape):
    """Each size with its dim, `...` written out. None if there are too many or too few."""
    if ... in dims:
        i = dims.index(...)
        dims = (*dims[:i], *[...] * (len(shape) - len(dims) + 1), *dims[i + 1 :])
    return list(zip(dims, shape, strict=True)) if len(dims) == len(shape) else None


# Signatures and shapes


@st.composite
def calls(draw, dims=DIMS):
    """A call whose shapes mostly fit: sizes are chosen first, and then a few are changed."""
    owner = draw(OWNERS)
    sizes = {name: draw(SIZES) for name in ("a", "b", "c")}
    names = [*PARAMETERS[: draw(st.integers(1, 4))], "return"]
    declared = {name: draw(declarations(dims, st.just(...))) for name in names}
    shapes = {name: tuple(draw(fitting(declared[name], sizes, owner))) for name in names}
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 3]))):
        name = draw(st.sampled_from(names))
        shapes[name] = draw(changed(shapes[name]))
    return Call(owner, declared, shapes)


@st.composite
def declarations(draw, dims, rest):
    """Up to four dims, now and then with a rest among them."""
    found = draw(st.lists(dims, max_size=4))
    if draw(st.sampled_from([False, False, True])):
        found.insert(draw(st.integers(0, len(found))), draw(rest))
    return tuple(found)


@st.composite
def fitting(draw, dims, sizes, owner):
    shape = []
    for dim in dims:
        if dim is ...:
            shape += draw(st.lists(SIZES, max_size=2))
        elif dim is Broadcast:
            shape.append(draw(st.one_of(st.just(1), SIZES)))
        elif isinstance(dim, OfSelf):
            shape.append(max(0, dim.on(owner)))
        else:
            shape.append(sizes.get(dim, dim))
    return shape


@st.composite
def changed(draw, shape):
    """The shape with another size, with one more, or with one less."""
    i = draw(st.integers(0, len(shape)))
    new, behind = draw(st.sampled_from([((draw(SIZES),), i + 1), ((draw(SIZES),), i), ((), i + 1)]))
    return (*shape[:i], *new, *shape[behind:])


# Calling


def function_of(annotations, result):
    """A method of that signature, which returns the result."""
    names = [name for name in annotations if name != "return"]
    made = {"result": result}
    exec(f"def call(self, {', '.join(names)}): return result", made)
    made["call"].__annotations__ = annotations
    return made["call"]


def tensor_of(shape, dtype=torch.float32):
    return torch.zeros((), dtype=dtype).expand(shape)  # takes no memory, whatever its shape


def error_of(annotations, tensors, owner=None, by_name=()):
    """What `@tensorcheck` raises, or None."""
    call = tensorcheck(function_of(annotations, tensors["return"]))
    given_by_name = {name: tensors[name] for name in by_name}
    positional = [tensors[name] for name in annotations if name != "return" and name not in by_name]
    try:
        call(owner, *positional, **given_by_name)
    except ValidationError as error:
        return error
    return None


def told_in(error):
    """What the message tells of, in its order: the lines `  name: ...`."""
    return [] if error is None else re.findall(r"^  (\w+): ", str(error), re.MULTILINE)


def shape_of(dims):
    return tuple(eval(dim.text, {"Dim": Dim}) if isinstance(dim, OfSelf) else dim for dim in dims)


def as_ours(dims, alias=float32_t):
    return Tensor[alias, shape_of(dims)]


def as_jaxtyped(dims):
    return Float[torch.Tensor, " ".join("..." if dim is ... else str(dim) for dim in dims)]


@given(calls(), st.data())
def test_what_fits_and_what_is_told_follow_the_model(call, data):
    arguments = list(call.declared)[:-1]
    by_name = data.draw(st.permutations(arguments[data.draw(st.integers(0, len(arguments))) :]))
    annotations = {name: as_ours(dims) for name, dims in call.declared.items()}
    tensors = {name: tensor_of(shape) for name, shape in call.shapes.items()}
    error = error_of(annotations, tensors, call.owner, by_name)

    want = failing(call)
    event("fits" if not want else "the return does not fit" if want == ["return"] else "arguments do not fit")
    assert told_in(error) == want
    if want:
        assert type(error) is DimensionMismatchError
        assert (error.function, error.parameter) == ("call", want[0])


@given(calls(), st.data())
def test_a_wrong_dtype_is_told_before_a_wrong_shape_of_the_same_tensor(call, data):
    declared = {name: data.draw(st.sampled_from(list(ALIASES))) for name in call.declared}
    found = {name: data.draw(st.sampled_from([dtype] * 5 + list(ALIASES))) for name, dtype in declared.items()}
    annotations = {name: as_ours(dims, ALIASES[declared[name]]) for name, dims in call.declared.items()}
    tensors = {name: tensor_of(shape, found[name]) for name, shape in call.shapes.items()}
    error = error_of(annotations, tensors, call.owner)

    want = [(name, DTypeMismatchError) for name in declared if declared[name] != found[name]]
    want += [(name, DimensionMismatchError) for name in failing(call)]
    want.sort(key=lambda finding: list(declared).index(finding[0]))
    want = [finding for finding in want if finding[0] != "return"] or want
    assert told_in(error) == [name for name, _ in want]
    assert want == [] or (error.parameter, type(error)) == want[0]


@given(calls())
def test_advice_makes_a_tensor_fit(call):
    annotations = {name: as_ours(dims) for name, dims in call.declared.items()}
    tensors = {name: tensor_of(shape) for name, shape in call.shapes.items()}
    error = error_of(annotations, tensors, call.owner)
    for name, advice in re.findall(r"^  (\w+): (?:.*\n    )*(\.\w+\(.*\)) would match", str(error), re.MULTILINE):
        shape = eval(f"tensor{advice}.shape", {"tensor": tensors[name]})
        event(advice.split("(")[0])
        assert name not in failing(call._replace(shapes=call.shapes | {name: tuple(shape)}))


@given(calls(dims=st.one_of(NAMES, NAMES, SIZES)), st.data())
def test_shapes_as_jaxtyping_writes_them_mean_the_same(call, data):
    tensors = {name: tensor_of(shape) for name, shape in call.shapes.items()}
    mixed = {name: data.draw(st.sampled_from([as_ours, as_jaxtyped])) for name in call.declared}
    for notation in (dict.fromkeys(call.declared, as_ours), dict.fromkeys(call.declared, as_jaxtyped), mixed):
        annotations = {name: notation[name](dims) for name, dims in call.declared.items()}
        error = error_of(annotations, tensors)
        assert told_in(error) == failing(call)
        assert error is None or error.parameter == failing(call)[0]


# jaxtyping as the referee

WORDS = st.one_of(NAMES, NAMES, SIZES.map(str), st.sampled_from(["_", "_b", "#a", "#b", "#c", "#3"]))
RESTS = st.sampled_from(["...", "*a", "*rest", "*rest", "*#rest", "*_"])


@st.composite
def jaxtyped_calls(draw):
    sizes = {name: draw(SIZES) for name in ("a", "b", "c")}
    rests = {name: draw(st.lists(SIZES, max_size=2)) for name in ("a", "rest")}
    names = [*PARAMETERS[: draw(st.integers(1, 4))], "return"]
    declared = {name: draw(declarations(WORDS, RESTS)) for name in names}
    shapes = {name: tuple(draw(fitting_words(declared[name], sizes, rests))) for name in names}
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        name = draw(st.sampled_from(names))
        shapes[name] = draw(changed(shapes[name]))
    return declared, shapes


@st.composite
def fitting_words(draw, words, sizes, rests):
    shape = []
    for word in words:
        bare = word.strip("#*_")
        if word in ("...", "*_"):
            shape += draw(st.lists(SIZES, max_size=2))
        elif word == "*#rest":
            kept = rests["rest"][draw(st.integers(0, 1)) :]
            shape += [draw(st.sampled_from([1, size])) for size in kept]
        elif word.startswith("*"):
            shape += rests[bare]
        elif word.startswith("_"):
            shape.append(draw(SIZES))
        else:
            size = sizes[bare] if bare in sizes else int(bare)
            shape.append(draw(st.sampled_from([1, size])) if word.startswith("#") else size)
    return shape


@given(jaxtyped_calls())
def test_jaxtyping_itself_agrees(call):
    declared, shapes = call
    annotations = {name: Float[torch.Tensor, " ".join(words)] for name, words in declared.items()}
    tensors = {name: tensor_of(shape) for name, shape in shapes.items()}
    referee = jaxtyped(typechecker=beartype)(function_of(annotations, tensors["return"]))
    try:
        referee(None, *(tensors[name] for name in declared if name != "return"))
        fits = True
    except TypeCheckError:
        fits = False
    event("fits" if fits else "does not fit")
    assert (error_of(annotations, tensors) is None) == fits


# The rules by example


@pytest.mark.parametrize(
    ("declared", "shapes", "wrong"),
    [
        ({"x": ("a", "b"), "y": ("b",)}, {"x": (2, 3), "y": (3,)}, []),
        ({"x": ("a", "b"), "y": ("b", "a")}, {"x": (2, 3), "y": (2, 3)}, ["y"]),
        ({"x": ("a", "a"), "y": ("a",)}, {"x": (2, 3), "y": (2,)}, ["x"]),
        ({"x": ("a", 9), "y": ("a",), "z": ("a",)}, {"x": (2, 3), "y": (2,), "z": (3,)}, ["x", "z"]),
        ({"x": ("a", 9), "y": ("a",)}, {"x": (2,), "y": (5,)}, ["x"]),  # another rank: x binds nothing
        ({"x": ("a", ..., "a")}, {"x": (2,)}, ["x"]),
        ({"x": ("a", ..., "b"), "y": (..., "b")}, {"x": (2, 7, 7, 3), "y": (3,)}, []),
        ({"x": (Broadcast, 4), "y": (5, 4)}, {"x": (3, 4), "y": (5, 4)}, ["x"]),
        ({"x": (Broadcast, 4), "y": (4,)}, {"x": (3, 4), "y": (4,)}, []),
        ({"x": (Broadcast,), "y": (5,)}, {"x": (0,), "y": (5,)}, ["x"]),
        ({"x": (Broadcast,), "y": (5,), "z": (1,)}, {"x": (3,), "y": (5,), "z": (1,)}, []),
        ({"x": (), "y": (...,)}, {"x": (), "y": ()}, []),
    ],
)
def test_binding(declared, shapes, wrong):
    call = Call(SimpleNamespace(), declared | {"return": ()}, shapes | {"return": ()})
    annotations = {name: as_ours(dims) for name, dims in call.declared.items()}
    tensors = {name: tensor_of(shape) for name, shape in call.shapes.items()}
    assert failing(call) == wrong
    assert told_in(error_of(annotations, tensors)) == wrong
