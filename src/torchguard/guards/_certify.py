"""Which dropped guards matter: apply common changes to a compiled model, and compare its results with eager mode.

The model is compiled on the backend that it will run on: what is stale depends on the backend. (Code of Inductor reads
a parameter of another dtype as if it had the old one; the graph run in eager mode does not.) Changes that kept guards
notice need no compilation: under the stance "eager_on_recompile" such a call runs in eager mode, which is what it is
compared with. Only for another batch size Dynamo may compile, as it would for a user, so that the changes after it meet
what was compiled for all sizes. Whether full guards would have noticed a change is known without compiling with them:
the audit checks them all.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchguard._progress import progress_line
from torchguard._pytrees import children, map_tensors, tensors_in
from torchguard._torch import dynamo, settings
from torchguard.exceptions import GuardError
from torchguard.guards._audit import audit
from torchguard.guards._audit_report import GuardViolation
from torchguard.guards._compile import compile, own_cache
from torchguard.guards._explain import describe
from torchguard.guards._filters import Filter, by_function
from torchguard.guards._perturb import (
    Perturbation,
    common_perturbations,
    perturb_argument,
    perturb_closure,
    perturb_value,
)
from torchguard.report import Answer, Section, Shown, Table

HARMFUL, HARMLESS, NOT_EXERCISED = "harmful", "harmless", "not exercised"
CORRECT, STALE, UNGUARDED, EAGER_FAILS = "correct", "stale", "stale without a filter, too", "fails in eager mode"
# How many guarded values are changed, one at a time.
_MOST_VALUES = 48
# Of the largest element: by how much the results of two compilers may differ, and more so in low precision.
_TOLERANCE, _LOW_PRECISION_TOLERANCE = 1e-4, 2e-2

Changes = Mapping[str, Callable[[], AbstractContextManager[Any]]]


@dataclass(frozen=True)
class LabelledGuard:
    """A dropped guard.

    Its label is "harmful" if it failed under a change with a stale result, "harmless" if it failed only under other
    changes, and "not exercised" if it never failed.
    """

    name: str
    type: str
    sources: tuple[str, ...]
    label: str


@dataclass(frozen=True)
class ChangeOutcome:
    """The result under one change, and the dropped guards, by name and type, that it violated.

    The result is "correct" if it equals eager mode's, otherwise "stale"; "stale without a filter, too" if Dynamo's full
    set of guards does not notice the change either; "fails in eager mode" if there is nothing to compare with.
    """

    change: str
    result: str
    violated: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class GuardCertificate(Shown):
    """How a filter affects results, under the changes that were tried.

    Attributes:
        filter: its `repr`.
        backend: the backend that the changes were tried on.
        guards: the guards it drops, with labels.
        outcomes: of the changes.
    """

    filter: str
    backend: str
    guards: tuple[LabelledGuard, ...]
    outcomes: tuple[ChangeOutcome, ...]

    def labelled(self, label: str) -> list[LabelledGuard]:
        return [guard for guard in self.guards if guard.label == label]

    @property
    def exercised(self) -> int:
        """How many of the dropped guards failed under a change."""
        return len(self.guards) - len(self.labelled(NOT_EXERCISED))

    @property
    def is_clean(self) -> bool:
        """Whether no change that was tried led to a wrong result that unfiltered guards would have prevented.

        This is about the `exercised` guards alone. If none of the dropped guards was exercised, it is False.
        """
        is_tried = bool(self.exercised) or not self.guards
        return is_tried and all(outcome.result != STALE for outcome in self.outcomes)

    def section(self) -> Section:
        """Whether a wrong result was seen, each change with its result, and each dropped guard with its label."""
        head, *_ = str(self).splitlines()
        status = "ok" if self.is_clean else "bad" if self.labelled(HARMFUL) else "unknown"
        outcomes = tuple((one.change, one.result, len(one.violated)) for one in self.outcomes)
        dropped = tuple((one.type, one.name, one.label) for one in self.guards)
        return Section(
            "Certificate of a guard filter",
            (
                Answer(status, f"{head}."),
                Table(("change", "result", "dropped guards that failed"), outcomes, "Changes that were tried"),
                Table(("type", "guard", "label"), dropped, "Dropped guards"),
            ),
        )

    def __str__(self) -> str:
        counts = ", ".join(f"{len(self.labelled(label))} {label}" for label in (HARMFUL, HARMLESS, NOT_EXERCISED))
        lines = [f"{self.filter} drops {len(self.guards)} guards on {self.backend}: {counts}"]
        if self.labelled(NOT_EXERCISED):
            lines.append(
                f"  No change made {len(self.labelled(NOT_EXERCISED))} of them fail: nothing is known about those."
            )
        lines += [f"  {outcome.change}: {outcome.result}" for outcome in self.outcomes]
        lines += [f"  harmful: {guard.type} {guard.name or '(no name)'}" for guard in self.labelled(HARMFUL)]
        return "\n".join(lines)


def certify(
    model: Callable[..., Any],
    inputs: Any,
    filter: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    changes: Changes | None = None,
    backend: Any = None,
    progress: bool | None = None,
) -> GuardCertificate:
    """Find out which of the guards that a filter drops lead to wrong results.

    The model is compiled with the filter. Then common changes are made one at a time, the outputs, the gradients and
    the model's tensors after the call are compared with eager mode's, and the change is undone: `train` and `eval`,
    dtype, batch size, strides, `requires_grad`, grad mode, autocast, hooks, a submodule, class or `forward` replaced,
    children added and removed, a parametrized weight, and another value for each number, bool, enum, list, tuple or
    function that a dropped guard checks (globals, closures, attributes). Before torch 2.13, which has one cache for all
    filters, everything that was compiled in the process is compiled anew afterwards.

    Args:
        inputs: the arguments of a call, as a tuple; or its only argument.
        changes: your own changes by name, each a function that returns a context manager. The context manager may
            return other arguments for the call, as a tuple.
        backend: the backend of the certificate. What is stale depends on it. By default that of `torch.compile`.
        progress: whether to show on stderr which change is being tried: on a terminal in one line that is erased at the
            end, in a pipe a line for each. By default only if stderr is a terminal.
    """
    return certify_as("certify", model, inputs, filter, kwargs, changes, backend, progress)


def certify_as(
    label: str,
    model: Callable[..., Any],
    inputs: Any,
    filter: Any,
    kwargs: Mapping[str, Any] | None,
    changes: Changes | None,
    backend: Any,
    progress: bool | None,
) -> GuardCertificate:
    """`certify`, with a label for its progress."""
    given = (inputs if isinstance(inputs, tuple) else (inputs,), dict(kwargs or {}))
    filter = filter if isinstance(filter, Filter) else by_function(filter)
    backend = dynamo.default_backend() if backend is None else backend
    own = [_own_perturbation(name, apply, given) for name, apply in (changes or {}).items()]
    with own_cache(), settings.without_limits(), settings.same_random_numbers(), progress_line(progress) as show:
        show(f"{label}: compiling")
        trial = _FilterTrial(model, given, filter, backend)
        everything = [*common_perturbations(model, *given), *trial.perturbations_of_values(), *own]
        outcomes = []
        for i, change in enumerate(everything, start=1):
            show(f"{label}: change {i} of {len(everything)}: {change.name}")
            outcomes.append(trial.outcome_of(change))
    name = backend if isinstance(backend, str) else dynamo.backend_name(backend)
    return GuardCertificate(repr(filter), name, tuple(trial.labelled(outcomes)), tuple(outcomes))


def _own_perturbation(name: str, apply: Callable[[], AbstractContextManager[Any]], given: Any) -> Perturbation:
    @contextlib.contextmanager
    def with_arguments():
        with apply() as changed:
            yield (changed, given[1]) if isinstance(changed, tuple) else given

    return Perturbation(name, with_arguments)


class _FilterTrial:
    """A model that is compiled with a filter, and run under changes."""

    def __init__(self, model: Callable[..., Any], given: Any, filter: Filter, backend: Any) -> None:
        self.model, self.given, self.filter = model, given, filter
        self.entries: list[Any] = []
        self.violations: list[GuardViolation] = []
        self.audit = audit(by_function(self._keep, repr(filter)), every=1, action=self.violations.extend)
        self.compiled = compile(model, filter=self.audit, backend=backend)
        want, got = self._run(self.model, given), self._run(self.compiled, given)
        if isinstance(got, Exception):
            raise GuardError(f"certify: the model fails before any change: {type(got).__name__}: {got}") from got
        if not _equal_results(got, want):
            raise GuardError(
                "certify: compiled, the model gives other results than in eager mode before any change, so that no "
                "change can be compared. Call it in a mode in which its results can be repeated, such as model.eval()."
            )

    def _keep(self, entries: Sequence[Any]) -> list[bool]:
        """Decide as the filter does, and record what it drops."""
        kept = self.filter(entries)
        self.entries += [entry for entry, keep in zip(entries, kept, strict=True) if not keep]
        return kept

    def perturbations_of_values(self) -> list[Perturbation]:
        """Other values for what a dropped guard checks; only once for the layers of a list."""
        frame = dynamo.frame_of(self.compiled, *self.given)
        if frame is None:
            return []
        compiled = dynamo.entries_of(frame.cache)
        found: dict[str, list[Perturbation]] = {}
        for entry in self.entries if compiled else ():
            source = entry.orig_guard.name
            pattern = re.sub(r"\d+", "*", source)
            if pattern in found or not entry.has_value or len(found) >= _MOST_VALUES:
                continue
            cell = frame.cells.get(source)
            if cell is not None:
                changes = perturb_closure(source, cell, self.given)
            elif source in frame.arguments:
                changes = perturb_argument(self.model, frame.arguments[source], entry.value, self.given)
            else:
                evaluate = functools.partial(compiled[0][1].value, f_locals=frame.f_locals)
                changes = perturb_value(source, entry.value, evaluate, self.given)
            if changes:
                found[pattern] = changes
        return [change for changes in found.values() for change in changes]

    def outcome_of(self, change: Perturbation) -> ChangeOutcome:
        self.violations.clear()
        with change.apply() as arguments:
            want = self._run(self.model, arguments)
            if isinstance(want, Exception):
                return ChangeOutcome(change.name, EAGER_FAILS, ())
            with torch.compiler.set_stance("default" if change.compiles else "eager_on_recompile"):
                is_correct = _equal_results(self._run(self.compiled, arguments), want)
        violated = tuple({(one.name, one.type): None for one in self.violations})
        # Without a violation all guards held, dropped ones included: Dynamo would not have recompiled without a filter.
        return ChangeOutcome(change.name, CORRECT if is_correct else STALE if violated else UNGUARDED, violated)

    def _run(self, call: Callable[..., Any], arguments: Any) -> "_Results | Exception":
        """All that a call computes, or its exception. What it changes in arguments and in the model is undone."""
        before = _tensors_of(self.model)
        args, kwargs = map_tensors(arguments, lambda z: z.detach().clone().requires_grad_(z.requires_grad))
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                output = call(*args, **kwargs)
                leaves = [*(tensor for _, tensor in tensors_in((args, kwargs))), *(tensor for tensor, _ in before)]
                gradients = _gradients(output, [leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf])
            after = [leaf.detach().clone() for leaf in leaves]
            return _Results(output, gradients, after)
        except Exception as error:  # a result to compare, like any other
            return error
        finally:
            with torch.no_grad():
                for tensor, value in before:
                    if not torch.equal(tensor, value):
                        tensor.copy_(value)

    def labelled(self, outcomes: Sequence[ChangeOutcome]) -> list[LabelledGuard]:
        harmful = {key for outcome in outcomes if outcome.result == STALE for key in outcome.violated}
        exercised = {key for outcome in outcomes for key in outcome.violated}
        found = {}
        for entry in self.entries:
            # A guard may consist of guards of other types on the same value: if one of them failed, so did it.
            keys = {(entry.name, type) for type in (entry.guard_type, *entry.derived_guard_types)}
            label = HARMFUL if keys & harmful else HARMLESS if keys & exercised else NOT_EXERCISED
            found[entry.name, entry.guard_type] = LabelledGuard(
                entry.name, entry.guard_type, describe(entry).sources, label
            )
        return list(found.values())


class _Results(NamedTuple):
    """All that a call computes: what it returns, gradients, and the arguments and the model's tensors after it."""

    output: Any
    gradients: list[Tensor | None]
    after: list[Tensor]


def _tensors_of(model: Any) -> list[tuple[Tensor, Tensor]]:
    tensors = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
    return [(tensor, tensor.detach().clone()) for tensor in tensors]


def _gradients(output: Any, leaves: list[Tensor]) -> list[Tensor | None]:
    """Of the outputs, each weighted differently: those of a softmax alone sum to a constant."""
    outputs = [z for _, z in tensors_in(output) if z.requires_grad]
    if not outputs or not leaves:
        return []
    weights = [torch.arange(z.numel(), device=z.device).cos().to(z.dtype).view(z.shape) for z in outputs]
    return [*torch.autograd.grad(outputs, leaves, weights, allow_unused=True)]


def _equal_results(got: "_Results | Exception", want: "_Results | Exception") -> bool:
    if isinstance(got, Exception) or isinstance(want, Exception):
        return False
    # Some gradients are zero but for rounding, such as that of an attention's key bias: compare with the largest.
    scale = max((_largest(z) for z in want.gradients if z is not None), default=0.0)
    return (
        _equal(got.output, want.output)
        and _equal(got.gradients, want.gradients, scale)
        and _equal(got.after, want.after)
    )


def _largest(z: Tensor) -> float:
    """The largest absolute value of a tensor that is finite."""
    z = z.to_dense() if z.layout != torch.strided else z
    finite = z[z.isfinite()]
    return finite.abs().amax().item() if finite.numel() else 0.0


def _equal(one: Any, two: Any, scale: float = 0.0) -> bool:
    """Whether two results are equal, part by part, up to a share of `scale` or of a tensor's own largest element."""
    if isinstance(one, Tensor) or isinstance(two, Tensor):
        return isinstance(one, Tensor) and isinstance(two, Tensor) and _equal_tensors(one, two, scale)
    left, right = children(one), children(two)
    if left or right:
        same = len(left) == len(right) and type(one) is type(two)
        return same and all(a == b and _equal(x, y, scale) for (a, x), (b, y) in zip(left, right, strict=True))
    if hasattr(one, "__array__") and hasattr(two, "__array__"):
        return _equal(torch.as_tensor(one), torch.as_tensor(two), scale)
    # Objects without `__eq__` count as equal if they have the same type.
    is_comparable = type(one).__eq__ is not object.__eq__
    return bool(one == two) if is_comparable else type(one) is type(two)


def _equal_tensors(one: Tensor, two: Tensor, scale: float) -> bool:
    same = one.dtype == two.dtype and one.shape == two.shape and one.requires_grad == two.requires_grad
    if not same or one.layout != two.layout:
        return False
    if one.layout != torch.strided:
        one, two = one.to_dense(), two.to_dense()
    if not two.is_floating_point() and not two.is_complex():
        return torch.equal(one, two)
    tolerance = _LOW_PRECISION_TOLERANCE if two.dtype.itemsize < 4 else _TOLERANCE
    wide = torch.complex128 if two.is_complex() else torch.float64
    one, two = one.detach().to(wide), two.detach().to(wide)
    absolute = tolerance / 10 * max(scale, _largest(two))
    return torch.allclose(one, two, rtol=tolerance, atol=absolute, equal_nan=True)
