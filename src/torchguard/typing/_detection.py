"""Recording of NaN and Inf in the tensors that a function returns, in the flags that it returns."""

from collections.abc import Iterable, Iterator, Set
from typing import Any, NamedTuple

from torch import Tensor

from torchguard import err
from torchguard._channel.config import CARRIERS, get_config
from torchguard._channel.detect import can_be_checked
from torchguard._channel.record import push_faults
from torchguard._pytrees import child_at, replace_children, tensors_in
from torchguard._torch.tracing import holds
from torchguard.exceptions import InvalidParameterError
from torchguard.typing._containers import Each, EachValue, Fields, Items, Node, OneOf
from torchguard.typing._dims import Named
from torchguard.typing._spec import TensorSpec

# The path from a value to a part of it: indices, keys, attribute names; None matches any of them.
Path = tuple[int | str | None, ...]
# Paths are compared as strings: Dynamo of torch 2.12 cannot compare tuples.
_STEP, _ANY = "\n", "*"
DETECTABLE = frozenset({err.NAN, err.INF})


class ReturnLayout(NamedTuple):
    """The returned tensors, as far as the annotation describes them.

    `flags` holds the paths at which flags may be, and whether only flags can be there; `values` the batch dimension of
    the other tensors (None: they have none).
    """

    flags: tuple[tuple[Path, bool], ...]
    values: tuple[tuple[str, int | None], ...]
    may_be_last: bool

    @property
    def may_have_flags(self) -> bool:
        return bool(self.flags) or self.may_be_last


def codes_to_detect(auto_detect: Any) -> frozenset[int]:
    """The codes that `auto_detect=` selects: all detectable ones, none, or a set."""
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


def layout_of(returned: Node | None) -> ReturnLayout:
    """Where a return annotation has flags, and the batch dimension of its other tensors."""
    specs = list(_declared_tensors(returned))
    flags = [(path, spec) for path, spec in specs if spec.is_flags and None not in path]
    names = {spec.head[0].text for _, spec in flags if spec.head and isinstance(spec.head[0], Named)}
    values = {_text(path): _dim_named(spec, names) for path, spec in specs if not spec.is_flags}
    may_be_last = returned is None or (isinstance(returned, Items) and returned.items[-1] is None)
    return ReturnLayout(
        tuple((path, _text(path) not in values) for path, _ in flags), tuple(values.items()), may_be_last
    )


def _text(path: Path) -> str:
    return _STEP.join(_ANY if step is None else str(step) for step in path)


def _declared_tensors(
    node: Node | None, path: Path = (), above: tuple[Node, ...] = ()
) -> Iterator[tuple[Path, TensorSpec]]:
    """Every declared tensor with its path."""
    if isinstance(node, TensorSpec):
        yield path, node
    elif isinstance(node, Items):
        for i, item in enumerate(node.items):
            yield from _declared_tensors(item, (*path, i), above)
    elif isinstance(node, (Each, EachValue)):
        yield from _declared_tensors(node.item, (*path, None), above)
    elif isinstance(node, OneOf):
        for _, option in node.options:
            yield from _declared_tensors(option, path, above)
    elif isinstance(node, Fields) and not any(node is other for other in above):
        for name, field in node.fields.items():
            yield from _declared_tensors(field, (*path, name), (*above, node))


def _dim_named(spec: TensorSpec, names: set[str]) -> int | None:
    """The batch dimension of a declared tensor: the dim with the same name as in the flags, else the first."""
    if not names or not any(isinstance(dim, Named) for dim in spec.plain_dims):
        return 0
    for i, dim in enumerate(spec.head):
        if dim.text in names:
            return i
    for i, dim in enumerate(spec.tail):
        if dim.text in names:
            return i - len(spec.tail)
    return None


def flags_at(result: Any, layout: ReturnLayout) -> tuple[Path, bool] | None:
    """The path of the flags in a returned value, and whether it is known that these are flags."""
    for path, is_known in layout.flags:
        if _can_be_flags(_at(result, path)):
            return path, is_known
    if layout.may_be_last and type(result) is tuple and len(result) > 1 and _looks_like_flags(result[-1]):
        return (len(result) - 1,), False
    return None


def detect(result: Any, path: Path, is_known: bool, layout: ReturnLayout, codes: Set[int], location: int) -> Any:
    """`result`, with NaN and Inf in its tensors recorded in the flags at `path`."""
    f = given = _at(result, path)
    flags = [_text(path), *(_text(other) for other, is_sure in layout.flags if is_sure)]
    for where, z in tensors_in(result):
        if _text(where) in flags or not can_be_checked(z) or z.device != given.device:
            continue
        dim = _samples_along(_text(where), layout)
        # A tensor without a row per sample cannot be attributed to samples.
        if dim is not None and z.ndim > max(dim, -dim - 1) and holds(z.shape[dim] == given.shape[0]):
            f = push_faults(f, z.movedim(dim, 0) if dim else z, location, codes, is_known=is_known)
    return result if f is given else _with(result, path, f)


def _samples_along(where: str, layout: ReturnLayout) -> int | None:
    steps = where.split(_STEP)
    for path, dim in layout.values:
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
