"""Would a call recompile, and why?

What to do about a guard that fails, in a line.
"""

import re
from dataclasses import dataclass
from typing import Any

from torchguard._torch.dynamo import entries_of, frame_of, is_full, stance
from torchguard._torch.guards import MARK_DYNAMIC
from torchguard.exceptions import GuardError
from torchguard.guards._audit import unobserved
from torchguard.guards._tree import Failure, failures_of

_SIZES_IN_RELATION = re.compile(r"\.size\(\)\[\d+\] == .*\.size\(\)\[\d+\]")
_ATTRIBUTE_OF_MODULE = re.compile(r"^L\['self'\]")


def advice_for(failure: Failure) -> str:
    guard, source = failure.guard, _plain(failure.guard.source)
    if failure.now.startswith("gone ("):
        return f"{source} was there when this was compiled: keep it, or give it a default."
    if guard.type == "TENSOR_MATCH":
        return _about_tensor(source, failure.why)
    if guard.type == "GLOBAL_STATE":
        return "Grad mode, autocast, default dtype or number of threads changed: set them before the first call."
    if guard.type == "TORCH_FUNCTION_MODE_STACK":
        return "A default device or another mode came or went: enter it before the first call."
    if guard.type == "DIMENSION_DYNAMIC_MARKING_GUARD":
        return f"mark_dynamic was called on {source} later, or not this time: mark it in every call."
    if guard.type in ("ID_MATCH", "WEAKREF_ALIVE", "FUNCTION_MATCH", "CLOSURE_MATCH"):
        return f"{source} is another object now: make it once, outside the loop, and pass the same one."
    if guard.type == "TYPE_MATCH":
        return f"{source} has another type now: always pass the same one."
    if "LENGTH" in guard.type or "DICT" in guard.type or "len(" in guard.code:
        return f"{source} has other items now: keep their number and keys, or stack them into a tensor."
    if _SIZES_IN_RELATION.search(guard.code):
        return "Two sizes no longer stand to each other as they did: pass tensors that fit, or mark both dims dynamic."
    if ".size()[" in guard.code or ".stride()[" in guard.code:
        return "A size left the range this was compiled for: mark_dynamic(x, dim, min=..., max=...), or pad to it."
    if guard.type in ("SHAPE_ENV", "RELATION", "LAMBDA_GUARD", "SYMBOLIC_SHAPE_GUARD"):
        return "Numbers or tensors no longer stand to each other as they did: pass them in the same relation each time."
    if source.startswith("G["):
        return f"{source} is a global that the code has as a constant: make it an argument, or a tensor."
    if _ATTRIBUTE_OF_MODULE.match(guard.source):
        return f"{source} is a constant of the compiled code: make it an argument or a buffer, or leave it as it is."
    return f"{source} is a constant of the compiled code: pass a tensor, or torch.compiler.set_stance for odd calls."


def _about_tensor(source: str, why: str) -> str:
    if found := re.search(r"size mismatch at index (\d+)", why):
        return f"{MARK_DYNAMIC}({source}, {found[1]}) before the first call, or compile with dynamic=True."
    if "stride mismatch" in why:
        return f"Pass {source}.contiguous(), or make it the same way each time."
    if "dtype mismatch" in why:
        return f"Cast {source} to one dtype before the call."
    if "requires_grad mismatch" in why:
        return f"Decide once whether {source} requires a gradient; detach it where it should not."
    if "rank mismatch" in why:
        return f"Give {source} the same number of dims each time."
    if "dispatch key" in why:
        return f"{source} is on another device, or under another mode such as inference_mode: keep to one."
    return f"{source} differs from the tensor this was compiled for: pass the same kind each time."


def _plain(source: str) -> str:
    """`L['x']` as `x`."""
    return re.sub(r"^L\['(\w+)'\]", r"\1", source)


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
    entries = entries_of(frame.cache)
    if stance() == "force_eager":
        return Why(False, len(entries), (), instead="By the stance 'force_eager' this call runs eagerly.")
    reasons = []
    with unobserved():
        for compile_id, guards in entries:
            failures = failures_of(guards, frame.f_locals)
            if not failures:
                return Why(False, len(entries), ())
            reasons += [Reason(compile_id, failure, advice_for(failure)) for failure in failures]
    gave_up = is_full(frame.cache)
    instead = _STANCES.get(stance(), _FULL if gave_up else "")
    return Why(not instead, len(entries), tuple(reasons), gave_up, instead)
