"""Recording NaN and Inf of what a function returns into the flags it returns."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from torch import Tensor

from torchguard import err
from torchguard._torch import is_same_size
from torchguard.checks import seen_in
from torchguard.errors.config import CARRIERS, get_config
from torchguard.errors.record import push_seen
from torchguard.exceptions import InvalidParameterError
from torchguard.typing.spec import TensorSpec
from torchguard.typing.structure import Fields, Items, Node, OneOf

# How to get from a value to a part of it: an index or a key, or the name of an attribute after a dot.
Step = int | str
Path = tuple[Step, ...]
DETECTABLE = frozenset({err.NAN, err.INF})


class Spots(NamedTuple):
    """Where flags are in what a function returns: in one of these places, or else perhaps last in a tuple."""

    declared: tuple[Path, ...]
    may_be_last: bool


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
    """Where an annotation says that flags are."""
    may_be_last = returned is None or (isinstance(returned, Items) and returned.items[-1] is None)
    return Spots(tuple(_declared_in(returned)), may_be_last)


def _declared_in(node: Node | None, path: Path = (), above: tuple[Node, ...] = ()) -> Iterator[Path]:
    if isinstance(node, TensorSpec):
        if node.is_flags:
            yield path
    elif isinstance(node, Items):
        for i, item in enumerate(node.items):
            yield from _declared_in(item, (*path, i), above)
    elif isinstance(node, OneOf):
        for _, option in node.options:
            yield from _declared_in(option, path, above)
    elif isinstance(node, Fields) and not any(node is other for other in above):
        for name, field in node.fields.items():
            yield from _declared_in(field, (*path, name), (*above, node))


def flags_at(result: Any, spots: Spots) -> tuple[Path, bool] | None:
    """Where the flags are in what a function returned, and whether that is sure."""
    for path in spots.declared:
        if can_be_flags(_at(result, path)):
            return path, True
    if spots.may_be_last and type(result) is tuple and len(result) > 1 and _looks_like_flags(result[-1]):
        return (len(result) - 1,), False
    return None


def detect(result: Any, path: Path, surely: bool, codes: Set[int], place: int) -> Any:
    """`result`, with what speaks against samples of its tensors added to the flags at `path`."""
    f = given = _at(result, path)
    for z in _tensors_in(result):
        # What has no row for each sample tells nothing about one.
        if z is not given and z.ndim > 0 and is_same_size(z.shape[0], given.shape[0]):
            seen = seen_in(z, place, codes)
            if seen:
                f = push_seen(f, seen, surely=surely)
    return result if f is given else _with(result, path, f)


def can_be_flags(f: Any) -> bool:
    return isinstance(f, Tensor) and f.ndim == 2 and f.dtype in CARRIERS and not f.requires_grad


def _looks_like_flags(f: Any) -> bool:
    return can_be_flags(f) and f.shape[1] == get_config().words_for(f.dtype)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors_in(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors_in(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))


def _at(value: Any, path: Path) -> Any:
    """The part of a value at a path, None if there is no such part."""
    for step in path:
        if isinstance(step, int):
            value = value[step] if isinstance(value, (tuple, list)) and step < len(value) else None
        elif isinstance(value, Mapping):
            value = value.get(step)
        else:
            value = getattr(value, step, None)
    return value


def _with(value: Any, path: Path, part: Any) -> Any:
    """A copy of a value with another part at the path."""
    if not path:
        return part
    step, *rest = path
    new = _with(_at(value, (step,)), tuple(rest), part)
    if isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", None)
        at = fields.index(step) if fields and isinstance(step, str) else step
        items = [new if i == at else item for i, item in enumerate(value)]
        return type(value)(*items) if fields else type(value)(items)  # not _replace, which torch 2.11 cannot trace
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **{step: new})  # pyright: ignore[reportArgumentType, reportCallIssue]
    return {**value, step: new}
