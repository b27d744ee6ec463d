"""Whether a call would recompile, why, and what to do about it."""

import re
from dataclasses import dataclass
from typing import Any

from torchguard._torch.dynamo import entries_of, frame_of, is_full, stance
from torchguard._torch.guards import MARK_DYNAMIC
from torchguard.exceptions import GuardError
from torchguard.guards._audit import audits_paused
from torchguard.guards._guard_tree import GuardFailure, failures_of
from torchguard.report import Answer, Section, Shown, Table

_EQUAL_SIZES = re.compile(r"\.size\(\)\[\d+\] == .*\.size\(\)\[\d+\]")
_ATTRIBUTE_OF_MODULE = re.compile(r"^L\['self'\]")

_LIMIT_REACHED = (
    "No cached entry matches, and the recompile limit is reached: "
    "this call runs eagerly, or raises if compiled with fullgraph=True."
)
# What a call does that no cached entry matches, under a stance of `torch.compiler.set_stance`.
_STANCES = {
    "eager_on_recompile": "No cached entry matches: under the stance 'eager_on_recompile' this call runs eagerly.",
    "fail_on_recompile": "No cached entry matches: under the stance 'fail_on_recompile' this call raises.",
}


@dataclass(frozen=True)
class Reason:
    """A guard of a cached entry that fails for a call, and what to do about it."""

    compile_id: str
    failure: GuardFailure
    advice: str

    def __str__(self) -> str:
        return f"{self.failure}\n    {self.advice}"


@dataclass(frozen=True)
class Why(Shown):
    """Whether a call would recompile; it is true if so.

    Attributes:
        recompiles: whether Dynamo would compile for this call.
        cache_size: how many entries Dynamo has cached for the function.
        reasons: all failing guards of all cached entries; empty if an entry matches, or if there is none.
        limit_reached: whether the recompile limit keeps Dynamo from compiling.
        fallback: what the call does when Dynamo may not compile: run eagerly, or raise. Empty if Dynamo may compile,
            or need not.
    """

    recompiles: bool
    cache_size: int
    reasons: tuple[Reason, ...]
    limit_reached: bool = False
    fallback: str = ""

    def __bool__(self) -> bool:
        return self.recompiles

    @property
    def answer(self) -> str:
        """Whether the call would recompile, in one sentence."""
        if not self.recompiles and not self.fallback:
            return "This call matches a cached entry: it would not recompile."
        if self.fallback:
            return self.fallback
        if not self.cache_size:
            return "This call would compile: there is no cached entry yet."
        which = "the only cached entry" if self.cache_size == 1 else f"all {self.cache_size} cached entries"
        return f"This call would recompile: it fails the guards of {which}."

    def section(self) -> Section:
        """The answer, and a table of all reasons with what to do about them."""
        answer = Answer("warning" if self.recompiles or self.fallback else "ok", self.answer)
        rows = tuple((one.compile_id, str(one.failure), one.advice, one.failure.guard.line) for one in self.reasons)
        columns = ("entry", "guard that fails", "what to do", "from")
        return Section("Would it recompile?", (answer, *([Table(columns, rows, "All reasons")] if rows else [])))

    def __str__(self) -> str:
        lines = [self.answer]
        for compile_id in dict.fromkeys(reason.compile_id for reason in self.reasons):
            lines.append(f"[{compile_id}]")
            lines += [f"  {reason}" for reason in self.reasons if reason.compile_id == compile_id]
        return "\n".join(lines)


def why(compiled: Any, /, *args: Any, **kwargs: Any) -> Why:
    """Whether calling `compiled` with these arguments would recompile, and for which reasons, without running it.

    The answer is about the frame the call starts with. Frames after a graph break are only known once it is reached.
    """
    try:
        frame = frame_of(compiled, args, kwargs)
    except TypeError as error:
        raise GuardError(f"why: the arguments do not match the signature: {error}.") from error
    if frame is None:
        raise GuardError(
            f"why: this {type(compiled).__name__} is not compiled. Give what torch.compile returned, not what a "
            "decorator made of it."
        )
    entries = entries_of(frame.cache)
    if stance() == "force_eager":
        return Why(False, len(entries), (), fallback="Under the stance 'force_eager' this call runs eagerly.")
    reasons = []
    with audits_paused():
        for compile_id, guards in entries:
            failures = failures_of(guards, frame.f_locals)
            if not failures:
                return Why(False, len(entries), ())
            reasons += [Reason(compile_id, failure, advice_for(failure)) for failure in failures]
    limit_reached = is_full(frame.cache)
    fallback = _STANCES.get(stance(), _LIMIT_REACHED if limit_reached else "")
    return Why(not fallback, len(entries), tuple(reasons), limit_reached, fallback)


def advice_for(failure: GuardFailure) -> str:
    """What to do about a guard that fails, in one line."""
    guard, source = failure.guard, _without_scope(failure.guard.source)
    if failure.now.startswith("gone ("):
        return f"{source} existed when this was compiled: keep it, or give it a default."
    if guard.type == "TENSOR_MATCH":
        return _advice_for_tensor(source, failure.why)
    if guard.type == "AUDIT":
        return "This is what action='recompile' is for. Keep that guard if it fails often."
    if guard.type == "GLOBAL_STATE":
        return "Grad mode, autocast, default dtype or number of threads changed: set them before the first call."
    if guard.type == "TORCH_FUNCTION_MODE_STACK":
        return "A default device or another mode was entered or left: enter it before the first call."
    if guard.type == "DIMENSION_DYNAMIC_MARKING_GUARD":
        return f"mark_dynamic was called on {source} in some calls only: mark it in every call."
    if guard.type in ("ID_MATCH", "WEAKREF_ALIVE", "FUNCTION_MATCH", "CLOSURE_MATCH"):
        return f"{source} is another object now: create it once, outside the loop, and pass the same one."
    if guard.type == "TYPE_MATCH":
        return f"{source} has another type now: always pass the same type."
    if "LENGTH" in guard.type or "DICT" in guard.type or "len(" in guard.code:
        return f"{source} has other items now: keep their number and keys, or stack them into a tensor."
    if _EQUAL_SIZES.search(guard.code):
        return (
            "Two sizes are no longer in the same relation: pass tensors of matching sizes, or mark both dims dynamic."
        )
    if ".size()[" in guard.code or ".stride()[" in guard.code:
        return "A size left the range this was compiled for: mark_dynamic(x, dim, min=..., max=...), or pad to it."
    if guard.type in ("SHAPE_ENV", "RELATION", "LAMBDA_GUARD", "SYMBOLIC_SHAPE_GUARD"):
        return "A relation between numbers or tensors changed: pass them in the same relation each time."
    if source.startswith("G["):
        return f"{source} is a global that was compiled as a constant: make it an argument, or a tensor."
    if _ATTRIBUTE_OF_MODULE.match(guard.source):
        return f"{source} was compiled as a constant: make it an argument or a buffer, or do not change it."
    return f"{source} was compiled as a constant: pass a tensor, or use torch.compiler.set_stance for rare calls."


def _advice_for_tensor(source: str, why: str) -> str:
    if found := re.search(r"size mismatch at index (\d+)", why):
        return f"{MARK_DYNAMIC}({source}, {found[1]}) before the first call, or compile with dynamic=True."
    if "stride mismatch" in why:
        return f"Pass {source}.contiguous(), or create it the same way each time."
    if "dtype mismatch" in why:
        return f"Cast {source} to one dtype before the call."
    if "requires_grad mismatch" in why:
        return f"Decide once whether {source} requires a gradient; detach it where it should not."
    if "rank mismatch" in why:
        return f"Give {source} the same number of dims each time."
    if "dispatch key" in why:
        return f"{source} is on another device, or under another mode such as inference_mode: use the same each time."
    return f"{source} differs from the tensor this was compiled for: pass the same kind each time."


def _without_scope(source: str) -> str:
    """`L['x']` as `x`."""
    return re.sub(r"^L\['(\w+)'\]", r"\1", source)
