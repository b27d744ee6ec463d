"""Would a call recompile, and why?"""

from dataclasses import dataclass
from typing import Any

from torchguard.exceptions import GuardError
from torchguard.guards._torch import entries_of, frame_of, is_full, stance
from torchguard.guards.advice import advice_for
from torchguard.guards.audit import unobserved
from torchguard.guards.tree import Failure, failures_of


@dataclass(frozen=True)
class Reason:
    """A guard that keeps a call from what was compiled before, and what can be done about it."""

    compile_id: str
    failure: Failure
    advice: str

    def __str__(self) -> str:
        return f"{self.failure}\n    {self.advice}"


@dataclass(frozen=True)
class Why:
    """Whether a call would compile again.

    `reasons` are all failing guards of all that was compiled before; empty if something fits, or nothing was compiled.
    `instead` tells what a call does that would compile, but may not; `gave_up` is true if that is since Dynamo gives up
    on a function that it compiled often.
    """

    recompiles: bool
    entries: int
    reasons: tuple[Reason, ...]
    gave_up: bool = False
    instead: str = ""

    def __bool__(self) -> bool:
        return self.recompiles

    def __str__(self) -> str:
        if not self.recompiles and not self.instead:
            return "This call runs what is compiled."
        if self.instead:
            found = [self.instead]
        elif self.entries:
            found = [f"This call would compile again: none of {self.entries} fits."]
        else:
            found = ["Nothing is compiled for this call yet: it would compile."]
        for compile_id in dict.fromkeys(reason.compile_id for reason in self.reasons):
            found.append(f"[{compile_id}]")
            found += [f"  {reason}" for reason in self.reasons if reason.compile_id == compile_id]
        return "\n".join(found)


_FULL = "Nothing fits, and Dynamo compiles no more for it: this call runs eagerly, with fullgraph=True it raises."
# What `torch.compiler.set_stance` has a call do for which nothing fits.
_STANCES = {
    "eager_on_recompile": "Nothing fits, and by the stance 'eager_on_recompile' this call runs eagerly.",
    "fail_on_recompile": "Nothing fits, and by the stance 'fail_on_recompile' this call raises.",
}


def why(compiled: Any, /, *args: Any, **kwargs: Any) -> Why:
    """Whether calling `compiled` like this would compile again, and for which reasons, without running it.

    It is about the frame the call starts with. Parts behind a graph break are looked up when they are reached.
    """
    try:
        frame = frame_of(compiled, args, kwargs)
    except TypeError as error:
        raise GuardError(f"why: these arguments do not fit: {error}.") from error
    if frame is None:
        raise GuardError(
            f"why: this {type(compiled).__name__} is not compiled. Give what torch.compile returned, not what a "
            "decorator made of it."
        )
    entries = entries_of(frame.kept)
    if stance() == "force_eager":
        return Why(False, len(entries), (), instead="By the stance 'force_eager' this call runs eagerly.")
    reasons = []
    with unobserved():
        for compile_id, guards in entries:
            failures = failures_of(guards, frame.f_locals)
            if not failures:
                return Why(False, len(entries), ())
            reasons += [Reason(compile_id, failure, advice_for(failure)) for failure in failures]
    gave_up = is_full(frame.kept)
    instead = _STANCES.get(stance(), _FULL if gave_up else "")
    return Why(not instead, len(entries), tuple(reasons), gave_up, instead)
