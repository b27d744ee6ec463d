"""What would make a tensor fit, in a line."""

from itertools import combinations

from torchguard.typing.scope import Finding, Scope, Seen


def advice_for(finding: Finding, scope: Scope) -> str | None:
    """The one change that would do, if there is such a change."""
    if finding.seen is not None:
        return _reshaping(finding.seen, scope)
    return finding.advice


def _reshaping(seen: Seen, scope: Scope) -> str | None:
    spec, path, shape = seen

    def fits(other: tuple[int, ...]) -> bool:
        return spec.fits_rank(other) and not spec.misfits((spec, path, other), scope.fork())

    for i, j in combinations(range(len(shape)), 2):
        swapped = list(shape)
        swapped[i], swapped[j] = shape[j], shape[i]
        if fits(tuple(swapped)):
            return f".transpose({i}, {j}) would fit."
    for i in range(len(shape) + 1):
        if fits((*shape[:i], 1, *shape[i:])):
            return f".unsqueeze({i}) would fit."
    for i, size in enumerate(shape):
        if size == 1 and fits((*shape[:i], *shape[i + 1 :])):
            return f".squeeze({i}) would fit."
    return None
