"""jaxtyping annotations, converted to `TensorSpec`: `Float[Tensor, "batch seq {self.hidden}"]`."""

import ast
import re
from typing import Any, get_args

import torch
from jaxtyping import AbstractArray

from torchguard.exceptions import AnnotationError
from torchguard.typing._dims import AnySize, DimSpec, Exact, Formula, Named, NamedRest, OneOr, RestSpec
from torchguard.typing._dtypes import DType
from torchguard.typing._scope import Scope
from torchguard.typing._spec import TensorSpec

_BRACES = re.compile(r"{([^{}]+)}")
_ALL_DTYPES = frozenset(dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype))


def is_jaxtyped(annotation: Any) -> bool:
    """Whether it is a jaxtyping annotation for torch tensors."""
    if not (isinstance(annotation, type) and issubclass(annotation, AbstractArray)):
        return False
    kinds = get_args(annotation.array_type) or (annotation.array_type,)
    return any(kind is Any or (isinstance(kind, type) and issubclass(kind, torch.Tensor)) for kind in kinds)


def spec_of_jaxtyped(annotation: Any) -> TensorSpec:
    text = f'{annotation.dtype.__name__}[{_name(annotation.array_type)}, "{annotation.dim_str}"]'
    try:
        dims = tuple(_dim_of(word) for word in annotation.dim_str.split())
        return TensorSpec(text, _dtype_of(annotation), dims)
    except AnnotationError as error:
        raise error if str(error).startswith(text) else AnnotationError(f"{text}: {error}") from None


def _dtype_of(annotation: Any) -> DType | None:
    if not isinstance(annotation.dtypes, (list, tuple)):  # Shaped: any
        return None
    patterns = [re.compile(re.escape(name)) if isinstance(name, str) else name for name in annotation.dtypes]
    members = (dtype for dtype in _ALL_DTYPES if any(p.fullmatch(str(dtype).split(".")[1]) for p in patterns))
    return DType(annotation.dtype.__name__, frozenset(members))


def _dim_of(word: str) -> DimSpec | RestSpec:
    """One word of a jaxtyping shape: modifiers, optionally `name=` as documentation, then the dimension."""
    modifiers, rest = "", word
    while rest and rest != "..." and (rest[0] in "#*_?" or rest.count("=") == 1):
        if rest[0] in "#*_?":
            modifiers, rest = modifiers + rest[0], rest[1:]
        else:
            rest = rest.split("=")[1]
    if "?" in modifiers:
        raise AnnotationError(f"{word!r} is for the leaves of a PyTree, which @tensorcheck does not read.")
    if rest == "..." or ("*" in modifiers and "_" in modifiers):
        return RestSpec()
    if "_" in modifiers:
        return AnySize()
    if "*" in modifiers:
        return NamedRest(rest, "#" in modifiers)
    dim = Exact(int(rest)) if rest.isdecimal() else Named(rest) if rest.isidentifier() else _formula_of(rest)
    return OneOr(dim) if "#" in modifiers else dim


def _formula_of(word: str) -> Formula:
    """An expression over dimension names, and over expressions in braces, whose names are arguments."""
    slots = iter(range(word.count("{")))
    try:
        inner = [compile(part.strip(), word, "eval") for part in _BRACES.findall(word)]
        outer = ast.parse(_BRACES.sub(lambda _: f"__argument{next(slots)}", word), mode="eval")
    except SyntaxError as error:
        raise AnnotationError(f"{word!r} is neither a name nor a number nor an expression.") from error
    called = {id(node.func) for node in ast.walk(outer) if isinstance(node, ast.Call)}
    used = [node.id for node in ast.walk(outer) if isinstance(node, ast.Name) and id(node) not in called]
    names = frozenset(name for name in used if not name.startswith("__argument"))
    code = compile(outer, word, "eval")

    def compute(scope: Scope) -> Any:
        try:
            given = {f"__argument{i}": eval(part, {}, scope.arguments) for i, part in enumerate(inner)}
            return eval(code, {}, {**scope.sizes, **given})
        except Exception as error:
            raise AnnotationError(f"{word!r} cannot be computed: {type(error).__name__}: {error}.") from error

    return Formula(word, names, compute)


def _name(array_type: Any) -> str:
    return getattr(array_type, "__name__", str(array_type))
