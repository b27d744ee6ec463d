"""The filter that drops the most guards of those never found harmful."""

import re
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchguard._torch import dynamo
from torchguard.exceptions import GuardError
from torchguard.guards._certify import HARMFUL, NOT_EXERCISED, Changes, GuardCertificate, LabelledGuard, certify
from torchguard.guards._compile import compile
from torchguard.guards._filters import Filter, from_source, keep_all, named, of_type, skip_all

# A type of guard with more exceptions than this is kept as a whole: the filter would become unreadable.
_MOST_EXCEPTIONS = 4


@dataclass(frozen=True)
class Suggestion:
    """A suggested filter.

    Attributes:
        filter: the filter.
        code: the same as code to paste.
        microseconds_before: what checking the guards of a call takes without it.
        microseconds_after: what it takes with it.
        certificate: of the filter.
    """

    filter: Filter
    code: str
    microseconds_before: float
    microseconds_after: float
    certificate: GuardCertificate

    def __str__(self) -> str:
        share = 1 - self.microseconds_after / self.microseconds_before
        times = f"guards per call: {self.microseconds_before:.1f} us before, {self.microseconds_after:.1f} us after"
        return f"{self.code}\n{times} ({share:.0%} less)\n{self.certificate}"


def suggest(
    model: Callable[..., Any],
    inputs: Any,
    state_changes: Changes | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    backend: Any = "eager",
) -> Suggestion:
    """Suggest the filter that drops the most guards of those never found harmful.

    All guards are tried as in `certify`, with your own `state_changes` as its `changes`. Guards on arguments and on the
    state of torch are always kept: they cost little, and check for the most common changes. So are guards on values
    for which no other value could be tried, such as strings.
    """
    settings = {"kwargs": kwargs, "changes": state_changes, "backend": backend}
    tried = certify(model, inputs, skip_all(), **settings)
    drop = {kind: _droppable(kind, tried.guards) for kind in ("module", "global", "closure")}
    filter = _filter(drop)
    certificate = certify(model, inputs, filter, **settings)
    while not certificate.is_clean and any(drop.values()):
        # A guard that is harmful to drop together with others counts as harmful alone: keep all of its type.
        harmful = {guard.type for guard in certificate.labelled(HARMFUL)}
        drop = {kind: {name: but for name, but in types.items() if name not in harmful} for kind, types in drop.items()}
        filter = _filter(drop)
        certificate = certify(model, inputs, filter, **settings)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    before, after = (_microseconds(model, one, args, dict(kwargs or {}), backend) for one in (keep_all(), filter))
    return Suggestion(filter, f"guards.compile(model, filter={_as_code(filter)})", before, after, certificate)


def _droppable(kind: str, guards: tuple[LabelledGuard, ...]) -> dict[str, tuple[str, ...]]:
    """The types of guards on this kind of source that can be dropped, each with the patterns of names to keep."""
    found = {}
    on_kind = [guard for guard in guards if kind in guard.sources]
    for name in dict.fromkeys(guard.type for guard in on_kind):
        kept = [guard.name for guard in on_kind if guard.type == name and _must_keep(guard)]
        exceptions = tuple(sorted({f"*{_last_step(one)}" for one in kept}))
        if len(exceptions) <= _MOST_EXCEPTIONS:
            found[name] = exceptions
    return found


def _must_keep(guard: LabelledGuard) -> bool:
    """Whether it was found harmful, or is on a value for which no other value could be tried, such as a string."""
    return guard.label == HARMFUL or (guard.label == NOT_EXERCISED and guard.type == "EQUALS_MATCH")


def _last_step(name: str) -> str:
    """`.training` of `self._modules['drop'].training`: what is harmful in one module is so in others."""
    steps = re.findall(r"\.\w+|\[[^\]]*\]", name)
    return steps[-1] if steps else name


def _filter(drop: Mapping[str, Mapping[str, tuple[str, ...]]]) -> Filter:
    dropped: Filter | None = None
    for kind, types in drop.items():
        for exceptions in dict.fromkeys(types.values()):
            names = [name for name, other in types.items() if other == exceptions]
            one = of_type(*sorted(names)) & from_source(kind)
            one = one & ~named(*exceptions) if exceptions else one
            dropped = one if dropped is None else dropped | one
    if dropped is None:
        return keep_all()
    return ~dropped


def _as_code(filter: Filter) -> str:
    return re.sub(r"\b(of_type|from_source|named|keep_all)\(", r"guards.\1(", repr(filter))


def _microseconds(
    model: Callable[..., Any], filter: Filter, args: tuple[Any, ...], kwargs: dict[str, Any], backend: Any
) -> float:
    compiled = compile(model, filter=filter, backend=backend)
    compiled(*args, **kwargs)
    frame = dynamo.frame_of(compiled, args, kwargs)
    if frame is None:
        raise GuardError(
            f"suggest: torch.compile does not compile a {type(model).__name__}. Give a module or a function."
        )
    entries = dynamo.entries_of(frame.cache)
    if not entries:
        raise GuardError("suggest: Dynamo compiled nothing for this call, so there are no guards to drop.")
    guards = entries[0][1]
    return min(timeit.repeat(lambda: guards.check(frame.f_locals), number=50, repeat=9)) / 50 * 1e6
