"""The last resort of quarantine: zeros in place of a parameter's gradient that is not finite.

Where operations cannot be followed (a graph break, an operation that fake tensors do not support, attention in a graph
for varying sizes, DTensors), uses of parameters are not protected (`parameter_uses.py`). There all samples of a call
with a fault are flagged, and a hook on each parameter keeps its gradient finite. If no sample was bad going forward,
the hook records the fault for all samples, for `backward_flags`.

In a graph, an opaque operator sets the hooks when the graph runs: Dynamo may run one graph for several models. Of
models with DTensors the hooks are set when a module is called: FSDP then has gathered its parameters, and these are
other tensors than between calls. The gradient of a DTensor gets zeros entry by entry, in each rank's own part, so that
no rank has to ask the others.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torchguard._channel.codes import ErrorCode
from torchguard._channel.detect import floats_of
from torchguard._channel.record import push
from torchguard._health import check_grads
from torchguard._operators import define_opaque
from torchguard._torch.tensors import is_distributed, map_local
from torchguard._torch.tracing import can_read, casts_to_float16
from torchguard._watch.detect import PROBE_NAN, all_finite
from torchguard._watch.select import enclosing_location

_STATES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class _FiniteHook:
    """A hook on the gradient of a parameter."""

    __torch_unserializable__ = True  # a copy of the parameter goes without it, and torch need not warn of that

    def __init__(self, state: Any) -> None:
        self.state = weakref.ref(state)

    def __call__(self, grad: Tensor) -> Tensor | None:
        state = self.state()
        if state is None or grad.layout != torch.strided or (can_read(grad) and all_finite(floats_of(grad))):
            return None
        if is_distributed(grad):
            return map_local(grad, lambda part: self._finite(part, ~part.isfinite(), state))
        return self._finite(grad, ~grad.isfinite().all(), state)

    def _finite(self, grad: Tensor, is_zero: Tensor, state: Any) -> Tensor:
        """The gradient with zeros where `is_zero`, which is recorded."""
        summary = state.summary
        if summary is None:
            return torch.where(is_zero, 0, grad).to(grad.dtype)
        if state.has_half or grad.dtype == torch.float16:  # the loss scale may be the cause: see `gradient_mask.py`
            is_zero = is_zero & (summary.origins[0] >= 0).any().to(grad.device)
        _record_for_all(state, summary, is_zero.any(), -1)
        return torch.where(is_zero, 0, grad).to(grad.dtype)


class _RecordHook:
    """A hook on the gradient of what a module returns in a checkpoint's second run, where samples are not known: it
    records a fault at a location, for all samples."""

    def __init__(self, state: Any, location: int) -> None:
        self.state, self.location = weakref.ref(state), location

    def __call__(self, grad: Tensor) -> None:
        state = self.state()
        if state is not None and state.summary is not None and not (can_read(grad) and all_finite(floats_of(grad))):
            _record_for_all(state, state.summary, ~floats_of(grad).isfinite().all(), self.location)


def record_faults_in(state: Any, z: Tensor, location: int) -> None:
    """Record faults in the gradient of a tensor for all samples."""
    if z.requires_grad and not is_distributed(z):
        z.register_hook(_RecordHook(state, location))


def _record_for_all(state: Any, summary: Any, is_bad: Tensor, location: int) -> None:
    """Record a fault in backward, if there is one, for all samples that were good going forward."""
    is_good = summary.origins[0] < 0
    if state.probes is None or len(is_good) > state.probes.shape[1]:
        return
    faults = torch.zeros_like(state.probes, requires_grad=False)
    faults[location, : len(is_good)] = PROBE_NAN * (is_good & is_bad.to(is_good.device)).to(faults.device)
    known = state.backward_faults
    state.backward_faults = faults if known is None else torch.maximum(known, faults)


def require_finite_gradients(state: Any, parameters: Iterable[nn.Parameter] | None = None) -> None:
    """Set a hook on each parameter of a watched model, or on some of them, once."""
    state.has_half = state.has_half or casts_to_float16()
    hooked = state.gradient_hooks
    for parameter in state.model.parameters() if parameters is None else parameters:
        known = hooked.get(id(parameter))
        if parameter.requires_grad and (known is None or known[0]() is not parameter):
            hooked[id(parameter)] = (weakref.ref(parameter), parameter.register_hook(_FiniteHook(state)))


def require_of_module(state: Any, module: nn.Module) -> None:
    """Set hooks on the DTensors among the parameters of one module that is called now."""
    require_finite_gradients(state, [one for one in module.parameters(recurse=False) if is_distributed(one)])


def with_overflowed_gradients(f: Tensor, state: Any, summary: Any) -> Tensor:
    """Flags, with all good samples flagged at the module of each parameter whose gradient is not finite.

    Waits for the device. Masks (`gradient_mask.py`) see the gradients of activations; where these and the activations
    are finite, the gradient of a weight, which sums their products, may overflow all the same.
    """
    is_good = torch.zeros(len(f), dtype=torch.bool, device=f.device)
    is_good[: len(summary.flags)] = summary.origins[0] < 0
    for name, kind in check_grads(state.model).bad.items():
        location = enclosing_location(name.rpartition(".")[0], state.paths)
        code = ErrorCode.NAN if kind == "NaN" else ErrorCode.INF
        f = push(f, code, state.ids[location], where=is_good)
    return f


def _require_op(flags: Tensor, handle: Tensor) -> Tensor:
    state = _STATES.get(int(handle))
    if state is not None:
        require_finite_gradients(state)
    return flags.clone()


_REQUIRE = define_opaque(
    "require_finite_gradients(Tensor flags, Tensor handle) -> Tensor",
    _require_op,
    lambda flags, handle: torch.empty_like(flags),
)


def require_in_graph(flags: Tensor, handle: Tensor) -> Tensor:
    """The flags of a call. When the graph runs, the hooks are set. `handle` has the number of the history."""
    return _REQUIRE(flags, handle)


def register_state(number: int, state: Any) -> None:
    """Let the operator find a state by the number of its history."""
    _STATES[number] = state
