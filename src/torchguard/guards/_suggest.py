"""The filter that saves most, of what was never seen to do harm."""

import re
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torchguard._torch import dynamo
from torchguard.exceptions import GuardError
from torchguard.guards._certify import HARMFUL, NOT_EXERCISED, Certificate, Changes, LabelledGuard, certify
from torchguard.guards._compile import compile
from torchguard.guards._filters import Filter, from_source, keep_all, named, of_type, skip_all

# With more exceptions than this a filter is no longer read by anybody: the type is kept then.
_MOST_EXCEPTIONS = 4


@dataclass(frozen=True)
class Suggestion:
    """A filter, as an object and as code to paste; what guards cost a call before and after; and how it was tried."""

    filter: Filter
    code: str
    microseconds_before: float
    microseconds_after: float
    certificate: Certificate

    def __str__(self) -> str:
        share = 1 - self.microseconds_after / self.microseconds_before
        times = f"{self.microseconds_before:.1f} us of guards a call become {self.microseconds_after:.1f}"
        return f"{self.code}\n{times} ({share:.0%} less)\n{self.certificate}"


def suggest(
    model: Callable[..., Any],
    inputs: Any,
    state_changes: Changes | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    backend: Any = "eager",
) -> Suggestion:
    """The filter that drops the most guards of which none was ever seen to do harm.

    All guards are tried as in `certify`, with the changes of your own that you name. Guards on arguments and on the
    state of torch are kept in any case: they cost little, and guard against what comes most often. So are those on
    values of which no other could be tried, such as texts.
    """
    settings = {"kwargs": kwargs, "changes": state_changes, "backend": backend}
    tried = certify(model, inputs, skip_all(), **settings)
    drop = {kind: _droppable(kind, tried.guards) for kind in ("module", "global", "closure")}
    filter = _filter(drop)
    certificate = certify(model, inputs, filter, **settings)
    while not certificate.is_clean and any(drop.values()):
        # What was found harmful together with others is harmful by itself as well: keep its type altogether.
        bad = {guard.type for guard in certificate.labelled(HARMFUL)}
        drop = {kind: {name: but for name, but in types.items() if name not in bad} for kind, types in drop.items()}
        filter = _filter(drop)
        certificate = certify(model, inputs, filter, **settings)
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    before, after = (_microseconds(model, one, args, dict(kwargs or {}), backend) for one in (keep_all(), filter))
    return Suggestion(filter, f"guards.compile(model, filter={_as_code(filter)})", before, after, certificate)


def _droppable(kind: str, guards: tuple[LabelledGuard, ...]) -> dict[str, tuple[str, ...]]:
    """The types of guards on such sources that can be dropped, each with the names to be kept."""
    found = {}
    here = [guard for guard in guards if kind in guard.sources]
    for name in dict.fromkeys(guard.type for guard in here):
        kept = [guard.name for guard in here if guard.type == name and _has_to_be_kept(guard)]
        exceptions = tuple(sorted({f"*{_last_step(one)}" for one in kept}))
        if len(exceptions) <= _MOST_EXCEPTIONS:
            found[name] = exceptions
    return found


def _has_to_be_kept(guard: LabelledGuard) -> bool:
    """Harm was seen; or it guards a value of which no other could be tried, a text say."""
    return guard.label == HARMFUL or (guard.label == NOT_EXERCISED and guard.type == "EQUALS_MATCH")


def _last_step(name: str) -> str:
    """`.training` of `self._modules['drop'].training`: what does harm in one place does so in others."""
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
        raise GuardError("suggest: the model cannot be compiled as it is. Give a module or a function.")
    compiled_before = dynamo.entries_of(frame.cache)
    if not compiled_before:
        raise GuardError("suggest: Dynamo compiled nothing for this call, so there are no guards to drop.")
    guards = compiled_before[0][1]
    return min(timeit.repeat(lambda: guards.check(frame.f_locals), number=50, repeat=9)) / 50 * 1e6
