"""The filter that drops the guards that were exercised and found harmless, if that saves time.

Most guards have to stay. A guard on a value stays even where another value made no difference: the filter also applies
to what is compiled after the next change, where the value may matter, and not every value can be tried. So do guards
that no change made fail. What is left is how modules store their children and tensors, which no result depends on.
"""

import re
import timeit
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchguard._torch import dynamo
from torchguard.exceptions import GuardError
from torchguard.guards._certify import HARMFUL, HARMLESS, NOT_EXERCISED, Changes, GuardCertificate, certify_as
from torchguard.guards._compile import compile, own_cache
from torchguard.guards._filters import Filter, keep_all, named, of_type, skip_all
from torchguard.guards._perturb import OWN_DICTS, in_other_mode
from torchguard.report import Answer, Facts, Section, Shown, Text

# A filter that saves less than this share of the time is not suggested: two measurements differ by as much.
_LEAST_SAVING = 0.02


@dataclass(frozen=True)
class Suggestion(Shown):
    """A suggested filter.

    Attributes:
        filter: the filter; `keep_all()` if none saves time.
        code: the same as code to paste.
        microseconds_before: what checking the guards of a call takes without it.
        microseconds_after: what it takes with it.
        certificate: of the filter.
        tried: the certificates of dropping all guards, in this mode and for a module in the other one (train or eval):
            which guards are harmful to drop, and which were not exercised. Neither are dropped.
    """

    filter: Filter
    code: str
    microseconds_before: float
    microseconds_after: float
    certificate: GuardCertificate
    tried: tuple[GuardCertificate, ...]

    @property
    def saves(self) -> bool:
        """Whether there is a filter to suggest."""
        return self.microseconds_after < self.microseconds_before

    def section(self) -> Section:
        """The code to paste and what it saves, and the certificate of the filter."""
        answer, *_ = str(self).splitlines() if not self.saves else ("This filter saves time.",)
        times = (("us before", self.microseconds_before), ("us after", self.microseconds_after))
        blocks = (Answer("ok", answer), Facts(times), Text(self.code, preformatted=True))
        return Section("Suggested guard filter", blocks, (self.certificate.section(),) if self.saves else ())

    def __str__(self) -> str:
        tried = self.tried[0]
        counts = ", ".join(f"{len(tried.labelled(one))} {one}" for one in (HARMFUL, HARMLESS, NOT_EXERCISED))
        learnt = (
            f"{len(tried.guards)} guards, tried under {len(tried.outcomes)} changes on {tried.backend}: {counts}. "
            "Those that are harmful to drop, not exercised or on a value are kept."
        )
        if not self.saves:
            return (
                f"Nothing to suggest: keep all guards ({self.microseconds_before:.1f} us per call). "
                f"Dropping those that are safe to drop saves no time.\n{learnt}"
            )
        share = 1 - self.microseconds_after / self.microseconds_before
        times = f"guards per call: {self.microseconds_before:.1f} us before, {self.microseconds_after:.1f} us after"
        return f"{self.code}\n{times} ({share:.0%} less)\n{learnt}\n{self.certificate}"


def suggest(
    model: Callable[..., Any],
    inputs: Any,
    state_changes: Changes | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    backend: Any = None,
    progress: bool | None = None,
) -> Suggestion:
    """Suggest the filter that drops the guards that were exercised and found harmless, if it saves time.

    All guards are tried as in `certify`, with your own `state_changes` as its `changes`, on the backend that the
    suggested code uses; a module is tried in training and in evaluation mode. What was not exercised stays, and so does
    every guard on a value, on an argument and on the state of torch. Often nothing is left that saves time: to drop
    more, choose a filter yourself and `audit` it.

    Args:
        backend: the backend of the suggested code. By default that of `torch.compile`.
        progress: as in `certify`.
    """
    settings = (kwargs, state_changes, backend, progress)
    trials = 3 if isinstance(model, nn.Module) else 2
    call = (inputs if isinstance(inputs, tuple) else (inputs,), dict(kwargs or {}))
    check_all = _check(model, keep_all(), call)
    tried = [certify_as(f"suggest, trial 1 of {trials}", model, inputs, skip_all(), *settings)]
    if isinstance(model, nn.Module):
        label = f"suggest, trial 2 of {trials}"
        tried += _in_other_mode(model, lambda: certify_as(label, model, inputs, skip_all(), *settings))
    filter = _filter(tried)
    before, after = _microseconds(check_all, _check(model, filter, call))
    certificate = certify_as(f"suggest, trial {trials} of {trials}", model, inputs, filter, *settings)
    if after > before * (1 - _LEAST_SAVING) or not certificate.is_clean:
        filter, after = keep_all(), before
        certificate = GuardCertificate(repr(filter), certificate.backend, (), ())
    return Suggestion(filter, _as_code(filter, backend), before, after, certificate, tuple(tried))


def _in_other_mode(model: nn.Module, certify_again: Callable[[], GuardCertificate]) -> list[GuardCertificate]:
    """The certificate in the other mode; none if the model fails in it, as a BatchNorm does with a single sample."""
    with in_other_mode(model):
        try:
            return [certify_again()]
        except GuardError:
            return []


def _filter(tried: Sequence[GuardCertificate]) -> Filter:
    """Drops the types of those dicts of modules that were found harmless, every one of them, in every trial."""
    dropped = []
    for name in OWN_DICTS:
        guards = [one for trial in tried for one in trial.guards if one.name.endswith(f".{name}")]
        labels = {one.label for one in guards if one.type == "TYPE_MATCH" and "module" in one.sources}
        if labels == {HARMLESS}:
            dropped.append(f"*.{name}")
    return ~(of_type("TYPE_MATCH") & named(*dropped)) if dropped else keep_all()


def _as_code(filter: Filter, backend: Any) -> str:
    text = re.sub(r"\b(of_type|named|keep_all)\(", r"guards.\1(", repr(filter))
    name = repr(backend) if isinstance(backend, str) else getattr(backend, "__name__", "backend")
    return f"guards.compile(model, filter={text}{'' if backend is None else f', backend={name}'})"


def _check(
    model: Callable[..., Any], filter: Filter, call: tuple[tuple[Any, ...], dict[str, Any]]
) -> Callable[[], bool]:
    """A function that checks the guards of a call. They hardly depend on the backend, so the fastest is used."""
    with own_cache():
        compiled = compile(model, filter=filter, backend="eager")
        compiled(*call[0], **call[1])
        frame = dynamo.frame_of(compiled, *call)
        if frame is None:
            raise GuardError(
                f"suggest: torch.compile does not compile a {type(model).__name__}. Give a module or a function."
            )
        entries = dynamo.entries_of(frame.cache)
        if not entries:
            raise GuardError("suggest: Dynamo compiled nothing for this call, so there are no guards to drop.")
        guards = entries[0][1].copy()
    return lambda: guards.check(frame.f_locals)


def _microseconds(*checks: Callable[[], bool]) -> list[float]:
    """The least time of each. They take turns, so that a busy machine slows all of them alike."""
    rounds = [[min(timeit.repeat(check, number=50, repeat=3)) for check in checks] for _ in range(9)]
    return [min(took) / 50 * 1e6 for took in zip(*rounds, strict=True)]
