"""Error messages of `@tensorcheck`: declared and found shapes side by side, where names were bound, and a remedy."""

from collections.abc import Iterator

from torchguard.exceptions import (
    DeviceMismatchError,
    DimensionMismatchError,
    DTypeMismatchError,
    ValidationError,
)
from torchguard.typing._dims import Broadcasting, DimSpec, NamedRest, OneOr
from torchguard.typing._scope import CheckedTensor, Mismatch, Scope


def advice_for(finding: Mismatch, scope: Scope) -> str | None:
    """The change of shape that satisfies the annotation, if there is exactly one."""
    if finding.checked is None:
        return finding.advice
    fitting = {call: shape for call, shape in _changes(finding.checked[2]) if _fits(shape, finding.checked, scope)}
    calls = list(fitting)
    return f"{calls[0]} would match." if calls and len(set(fitting.values())) == 1 else None


def _changes(shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Calls that move, add or remove one dim, and the shape each gives."""
    found = []
    for i, size in enumerate(shape):
        others = (*shape[:i], *shape[i + 1 :])
        for j in range(len(shape)):
            call = f".transpose({i}, {j})" if j == i + 1 else f".movedim({i}, {j})"
            if j not in (i, i - 1):  # adjacent dims are swapped once
                found.append((call, (*others[:j], size, *others[j:])))
        if size == 1:
            found.append((f".squeeze({i})", others))
    found += [(f".unsqueeze({i})", (*shape[:i], 1, *shape[i:])) for i in range(len(shape) + 1)]
    return found


def _fits(shape: tuple[int, ...], checked: CheckedTensor, scope: Scope) -> bool:
    spec, path, _ = checked
    return spec.has_rank_of(shape) and not spec.mismatches((spec, path, shape), scope.fork())


_WRONG = {
    DimensionMismatchError: "has the wrong shape",
    DTypeMismatchError: "has the wrong dtype",
    DeviceMismatchError: "is on the wrong device",
}


def error_of(scope: Scope) -> ValidationError:
    """The error for the first finding; its message lists all."""
    first, *others = scope.findings
    lines = [f"{scope.function}: {first.path} {_WRONG.get(first.error, 'is not what was declared')}.", ""]
    lines += _block(first, scope)
    if others:
        lines += ["", f"  {len(others)} more {'does' if len(others) == 1 else 'do'} not fit:", ""]
        lines += [line for finding in others for line in _block(finding, scope)]
    if bindings := ", ".join(_bindings(scope)):
        lines += ["", f"  {bindings}"]
    return first.error("\n".join(lines), scope.function, first.path)


def _block(finding: Mismatch, scope: Scope) -> list[str]:
    if finding.checked is None:
        rows = [f"declared  {finding.declared}", f"found     {finding.found}"]
    else:
        rows = _shapes(finding.checked, scope)
    advice = advice_for(finding, scope)
    title = f"{finding.path}: {finding.annotation}" if finding.annotation else finding.path
    return [f"  {title}", *(f"    {row}" for row in rows), *([f"    {advice}"] if advice else [])]


def _shapes(checked: CheckedTensor, scope: Scope) -> list[str]:
    spec, _, shape = checked
    if not spec.has_rank_of(shape):
        found = _row([str(size) for size in shape])
        least = len(spec.head) + len(spec.tail)
        wanted = f"{'at least ' if spec.rest else ''}{_dims(least)}"
        declared = _row([dim.text for dim in spec.dims])
        width = max(len(declared), len(found))
        return [
            f"declared  {declared:<{width}}  {wanted}",
            f"found     {found:<{width}}  {_dims(len(shape))}",
            f"          {'^' * len(found)}",
        ]
    columns = _columns(checked, scope.fork())
    widths = [max(map(len, column)) for column in columns]
    declared, expected, found, marks = (
        [text.rjust(width) for text, width in zip(row, widths, strict=True)] for row in zip(*columns, strict=True)
    )
    return [
        f"declared  {_row(declared)}",
        f"expected  {_row(expected)}",
        f"found     {_row(found)}",
        f"           {'  '.join(marks)}".rstrip(),
    ]


def _columns(checked: CheckedTensor, scope: Scope) -> list[tuple[str, str, str, str]]:
    """Per declared dim: its text, the expected size, the size found, and a marker if they differ."""
    spec, _, shape = checked
    wrong = spec.mismatches(checked, scope)
    columns = []
    for i, dim in spec.dims_with_positions(shape):
        found = str(shape[i])
        columns.append((dim.text, _expected(dim, scope, checked, len(shape) - i), found, _mark(found, i in wrong)))
    if spec.rest is not None:
        middle = range(len(spec.head), len(shape) - len(spec.tail))
        found = ", ".join(str(shape[i]) for i in middle) or "none"
        known = scope.rests.get(spec.rest.name) if isinstance(spec.rest, NamedRest) else None
        expected = "..." if known is None else ", ".join(str(size) for size in known[0]) or "none"
        is_wrong = not spec.rest.accepts(tuple(shape[i] for i in middle), scope)
        columns.insert(len(spec.head), (spec.rest.text, expected, found, _mark(found, is_wrong)))
    return columns


def _mark(found: str, is_wrong: bool) -> str:
    return "^" * len(found) if is_wrong else ""


def _expected(dim: DimSpec, scope: Scope, checked: CheckedTensor, from_right: int) -> str:
    if isinstance(dim, Broadcasting):
        return " or ".join(str(size) for size in sorted({1} | dim.others(scope, checked, from_right)))
    size = dim.expected(scope)
    return "any" if size is None else f"1 or {size}" if isinstance(dim, OneOr) else str(size)


def _dims(count: int) -> str:
    return f"{count} dim" if count == 1 else f"{count} dims"


def _row(texts: list[str]) -> str:
    return f"({', '.join(texts)}{',' * (len(texts) == 1)})"


def _bindings(scope: Scope) -> Iterator[str]:
    """The tensor that bound each name: the first that has the name and was accepted."""
    rejected = [finding.checked for finding in scope.findings if not finding.binds]
    listed: set[str] = set()
    for checked in scope.checked:
        spec, path, shape = checked
        if any(checked is other for other in rejected):
            continue
        for i, dim in spec.dims_with_positions(shape):
            name = dim.dim.text if isinstance(dim, OneOr) and shape[i] != 1 else dim.text
            if name in scope.sizes and name not in listed:
                listed.add(name)
                yield f"{name} = {scope.sizes[name]} (dim {i} of {path})"
        if isinstance(spec.rest, NamedRest) and spec.rest.name not in listed:
            listed.add(spec.rest.name)
            yield f"*{spec.rest.name} = {scope.rests[spec.rest.name][0]} (in {path})"
