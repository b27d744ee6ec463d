"""What would make a tensor fit, in a line."""

from torchguard.typing.scope import Finding, Scope, Seen


def advice_for(finding: Finding, scope: Scope) -> str | None:
    """The one change that would do, if there is exactly one."""
    if finding.seen is None:
        return finding.advice
    fitting = {call: shape for call, shape in _changes(finding.seen[2]) if _fits(shape, finding.seen, scope)}
    calls = list(fitting)
    return f"{calls[0]} would fit." if calls and len(set(fitting.values())) == 1 else None


def _changes(shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Calls that move, add or remove one dim, and the shape each gives."""
    found = []
    for i, size in enumerate(shape):
        others = (*shape[:i], *shape[i + 1 :])
        for j in range(len(shape)):
            call = f".transpose({i}, {j})" if j == i + 1 else f".movedim({i}, {j})"
            if j not in (i, i - 1):  # the neighbours change places once
                found.append((call, (*others[:j], size, *others[j:])))
        if size == 1:
            found.append((f".squeeze({i})", others))
    found += [(f".unsqueeze({i})", (*shape[:i], 1, *shape[i:])) for i in range(len(shape) + 1)]
    return found


def _fits(shape: tuple[int, ...], seen: Seen, scope: Scope) -> bool:
    spec, path, _ = seen
    return spec.fits_rank(shape) and not spec.misfits((spec, path, shape), scope.fork())
