"""Recording NaN and Inf of what a function returns into the flags it returns."""

from collections.abc import Iterable, Iterator, Set
from typing import Any, NamedTuple

from torch import Tensor

from torchguard import err
from torchguard._channel.config import CARRIERS, get_config
from torchguard._channel.record import push_seen
from torchguard._pytrees import child_at, replace_children, tensors_in
from torchguard._torch.tracing import holds
from torchguard.checks import can_be_looked_at, seen_in
from torchguard.exceptions import InvalidParameterError
from torchguard.typing._dims import Named
from torchguard.typing._nodes import Each, EachValue, Fields, Items, Node, OneOf
from torchguard.typing._spec import TensorSpec

# How to get from a value to a part of it: indices, keys, names of attributes; None for any of them.
Path = tuple[int | str | None, ...]
# The same as text: Dynamo of torch 2.12 cannot compare tuples.
_STEP, _ANY = "\n", "*"
DETECTABLE = frozenset({err.NAN, err.INF})


class Spots(NamedTuple):
    """What an annotation says about the returned tensors.

    `flags` is where flags may be, and whether nothing else may be there; `values` along which dim the samples lie in
    other tensors (None: along none).
    """

    flags: tuple[tuple[Path, bool], ...]
    values: tuple[tuple[str, int | None], ...]
    may_be_last: bool

    @property
    def may_have_flags(self) -> bool:
        return bool(self.flags) or self.may_be_last


def codes_to_detect(auto_detect: Any) -> frozenset[int]:
    """What `auto_detect=` asks for: all that can be detected, nothing, or a set of codes."""
    if auto_detect is True:
        return DETECTABLE
    if auto_detect is False or auto_detect is None:
        return frozenset()
    codes = frozenset(auto_detect) if isinstance(auto_detect, Iterable) else None
    if codes is None or not codes <= DETECTABLE:
        raise InvalidParameterError(
            f"tensorcheck: auto_detect is {auto_detect!r}. Give True, False, or a set of err.NAN and err.INF; "
            "for other errors push them yourself.",
            "tensorcheck",
            "auto_detect",
        )
    return codes


def spots_of(returned: Node | None) -> Spots:
    """What a return annotation says about where flags and samples are."""
    specs = list(_placed(returned))
    flags = [(path, spec) for path, spec in specs if spec.is_flags and None not in path]
    names = {spec.head[0].text for _, spec in flags if spec.head and isinstance(spec.head[0], Named)}
    values = {_text(path): _dim_named(spec, names) for path, spec in specs if not spec.is_flags}
    may_be_last = returned is None or (isinstance(returned, Items) and returned.items[-1] is None)
    return Spots(tuple((path, _text(path) not in values) for path, _ in flags), tuple(values.items()), may_be_last)


def _text(path: Path) -> str:
    return _STEP.join(_ANY if step is None else str(step) for step in path)


def _placed(node: Node | None, path: Path = (), above: tuple[Node, ...] = ()) -> Iterator[tuple[Path, TensorSpec]]:
    """Every declared tensor with its path."""
    if isinstance(node, TensorSpec):
        yield path, node
    elif isinstance(node, Items):
        for i, item in enumerate(node.items):
            yield from _placed(item, (*path, i), above)
    elif isinstance(node, (Each, EachValue)):
        yield from _placed(node.item, (*path, None), above)
    elif isinstance(node, OneOf):
        for _, option in node.options:
            yield from _placed(option, path, above)
    elif isinstance(node, Fields) and not any(node is other for other in above):
        for name, field in node.fields.items():
            yield from _placed(field, (*path, name), (*above, node))


def _dim_named(spec: TensorSpec, names: set[str]) -> int | None:
    """Where the samples lie in a declared tensor: along the dim that is named as in the flags, else along the first."""
    if not names or not any(isinstance(dim, Named) for dim in spec.plain_dims):
        return 0
    for i, dim in enumerate(spec.head):
        if dim.text in names:
            return i
    for i, dim in enumerate(spec.tail):
        if dim.text in names:
            return i - len(spec.tail)
    return None


def flags_at(result: Any, spots: Spots) -> tuple[Path, bool] | None:
    """Where the flags are in what a function returned, and whether that is sure."""
    for path, surely in spots.flags:
        if _can_be_flags(_at(result, path)):
            return path, surely
    if spots.may_be_last and type(result) is tuple and len(result) > 1 and _looks_like_flags(result[-1]):
        return (len(result) - 1,), False
    return None


def detect(result: Any, path: Path, surely: bool, spots: Spots, codes: Set[int], place: int) -> Any:
    """`result`, with what speaks against samples of its tensors added to the flags at `path`."""
    f = given = _at(result, path)
    flags = [_text(path), *(_text(other) for other, is_sure in spots.flags if is_sure)]
    for where, z in tensors_in(result):
        if _text(where) in flags or not can_be_looked_at(z) or z.device != given.device:
            continue
        dim = _samples_along(_text(where), spots)
        # What has no row for each sample tells nothing about one.
        if dim is not None and z.ndim > max(dim, -dim - 1) and holds(z.shape[dim] == given.shape[0]):
            seen = seen_in(z.movedim(dim, 0) if dim else z, place, codes)
            if seen:
                f = push_seen(f, seen, surely=surely)
    return result if f is given else _with(result, path, f)


def _samples_along(where: str, spots: Spots) -> int | None:
    steps = where.split(_STEP)
    for path, dim in spots.values:
        declared = path.split(_STEP)
        if len(declared) == len(steps) and all(d in (_ANY, s) for d, s in zip(declared, steps, strict=True)):
            return dim
    return 0


def _can_be_flags(f: Any) -> bool:
    return isinstance(f, Tensor) and f.ndim == 2 and f.dtype in CARRIERS and not f.requires_grad


def _looks_like_flags(f: Any) -> bool:
    return _can_be_flags(f) and holds(f.shape[1] == get_config().words_for(f.dtype))


def _at(value: Any, path: Path) -> Any:
    """The part of a value at a path, None if there is no such part."""
    for step in path:
        value = child_at(value, step)
    return value


def _with(value: Any, path: Path, part: Any) -> Any:
    """A copy of a value with another part at the path."""
    if not path:
        return part
    step = path[0]
    if isinstance(step, int) and hasattr(value, "_fields"):
        step = value._fields[step]
    return replace_children(value, {step: _with(child_at(value, path[0]), path[1:], part)})
